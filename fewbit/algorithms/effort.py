"""Presets of effort: which algorithm and which transformations a scheme gets where the user names none.

Chosen by measurement on SmolLM2-135M; `docs/quality.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fewbit.errors import SchemeError, closest
from fewbit.spec.key import LinearKey
from fewbit.spec.scheme import Scheme

EFFORTS = ("fast", "balanced", "best")


@dataclass(frozen=True)
class Means:
    """What an effort means for a scheme.

    Attributes:
        algorithm: name of what chooses the codes.
        transforms: names of what comes before, in order.
        settings: of the algorithm, where they are not its defaults.
        optional: those of the transformations that are left out where a model's graph does not allow them.
    """

    algorithm: str
    transforms: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


_FAST = Means("round_to_nearest")
_NARROW = {"balanced": Means("gptq", settings={"asymmetric": 0.25}), "best": Means("sign_round")}
_FLOATS = {"balanced": Means("gptq"), "best": Means("gptq")}
_INTEGERS = {"balanced": Means("round_to_nearest"), "best": Means("gptq")}
_SMOOTHED = {
    "balanced": Means("gptq", ("smoothquant",)),
    "best": Means("gptq", ("rotation", "smoothquant"), optional=frozenset({"rotation"})),
}


def means_for(effort: str, scheme: Scheme) -> Means:
    """What `effort` means for `scheme`.

    Weights of 8-bit integers leave little to win, and `balanced` reads no data for them unless activations are 8-bit
    integers too: there outliers are what costs, and SmoothQuant moves them into the weights. `best` spreads them by a
    rotation first, which gives a tied head a weight of its own; a model that cannot be rotated does without.

    Raises:
        SchemeError: the effort is unknown.
    """
    if effort not in EFFORTS:
        raise SchemeError(f"Unknown effort {effort!r}.", closest(effort, EFFORTS))
    if effort == "fast":
        return _FAST
    if any(key.weight.element.bits < 8 for key in scheme.keys):
        return _NARROW[effort]
    if not all(key.weight.element.is_integer for key in scheme.keys):
        return _FLOATS[effort]
    return (_SMOOTHED if any(_rounds_inputs_to_integers(key) for key in scheme.keys) else _INTEGERS)[effort]


def _rounds_inputs_to_integers(key: LinearKey) -> bool:
    return key.activation is not None and key.activation.element.is_integer
