"""Presets of effort: which algorithm a scheme gets where the user names none.

Chosen by measurement on SmolLM2-135M; `docs/quality.md` has the figures.
"""

from __future__ import annotations

from fewbit.errors import SchemeError, closest
from fewbit.spec.scheme import Scheme

EFFORTS = ("fast", "balanced", "best")

_NARROW = {"fast": "round_to_nearest", "balanced": "gptq", "best": "sign_round"}
_WIDE = {"fast": "round_to_nearest", "balanced": "round_to_nearest", "best": "gptq"}


def algorithm_for(effort: str, scheme: Scheme) -> str:
    """Name of the algorithm that `effort` means for `scheme`.

    Eight bits leave little to win, so that `balanced` reads no data for them.

    Raises:
        SchemeError: the effort is unknown.
    """
    if effort not in EFFORTS:
        raise SchemeError(f"Unknown effort {effort!r}.", closest(effort, EFFORTS))
    narrow = any(rule.key.weight.element.bits < 8 for rule in scheme.rules)
    return (_NARROW if narrow else _WIDE)[effort]
