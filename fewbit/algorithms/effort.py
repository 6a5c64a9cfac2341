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
    """

    algorithm: str
    transforms: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


_FAST = Means("round_to_nearest")
_NARROW = {"balanced": Means("gptq"), "best": Means("sign_round")}
_NARROW_INTEGERS = {"balanced": Means("gptq", settings={"asymmetric": 0.25}), "best": Means("sign_round")}
_FLOATS = {"balanced": Means("gptq"), "best": Means("gptq")}
_INTEGERS = {"balanced": Means("round_to_nearest"), "best": Means("gptq")}
_SMOOTHED = {
    "balanced": Means("round_to_nearest", ("smoothquant",)),
    "best": Means("gptq", ("smoothquant",)),
}


def means_for(effort: str, scheme: Scheme) -> Means:
    """What `effort` means for `scheme`.

    The asymmetric term of GPTAQ was measured for integers alone. Weights of 8-bit integers leave little to win, and
    `balanced` reads no data for them unless activations are 8-bit integers too: there outliers are what costs, and
    SmoothQuant moves them into the weights.

    Raises:
        SchemeError: the effort is unknown.
    """
    if effort not in EFFORTS:
        raise SchemeError(f"Unknown effort {effort!r}.", closest(effort, EFFORTS))
    if effort == "fast":
        return _FAST
    narrow = [key.weight.element for key in scheme.keys if key.weight.element.bits < 8]
    if narrow:
        return (_NARROW_INTEGERS if all(element.is_integer for element in narrow) else _NARROW)[effort]
    if not all(key.weight.element.is_integer for key in scheme.keys):
        return _FLOATS[effort]
    return (_SMOOTHED if any(_rounds_inputs_to_integers(key) for key in scheme.keys) else _INTEGERS)[effort]


def _rounds_inputs_to_integers(key: LinearKey) -> bool:
    return key.activation is not None and key.activation.element.is_integer
