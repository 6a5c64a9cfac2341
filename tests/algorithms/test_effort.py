"""Effort presets name algorithms that exist and do not decline with effort."""

from __future__ import annotations

import pytest

from fewbit.algorithms.effort import EFFORTS, algorithm_for
from fewbit.algorithms.registry import algorithm
from fewbit.errors import SchemeError
from fewbit.models.quantize import QuantizeOptions
from fewbit.spec.presets import PRESETS


@pytest.mark.parametrize("scheme", PRESETS.values(), ids=list(PRESETS))
def test_more_effort_reads_at_least_as_much_data(scheme) -> None:  # type: ignore[no-untyped-def]
    chosen = [algorithm(algorithm_for(effort, scheme)) for effort in EFFORTS]
    data = [one.needs_gram + one.refines_blocks for one in chosen]
    assert data == sorted(data) and data[0] < data[-1]


def test_an_algorithm_that_is_named_wins() -> None:
    assert QuantizeOptions("W4A16", effort="balanced").recipe().algorithm == "gptq"
    recipe = QuantizeOptions("W4A16", effort="best", algorithm="scale-search").recipe()
    assert recipe.algorithm == "scale_search"
    tuned = QuantizeOptions("W4A16", algorithm="gptq", settings={"damping": "0.05"}).recipe()
    assert tuned.settings["damping"] == 0.05 and tuned.settings["act_order"] is True


def test_an_unknown_effort_is_answered_with_the_closest() -> None:
    with pytest.raises(SchemeError, match="balanced"):
        QuantizeOptions("W4A16", effort="balance").recipe()
