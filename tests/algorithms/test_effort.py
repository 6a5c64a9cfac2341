"""Effort presets name algorithms that exist and do not decline with effort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fewbit.algorithms.effort import EFFORTS, means_for
from fewbit.algorithms.registry import algorithm
from fewbit.errors import ModelError, SchemeError
from fewbit.models.quantization.quantize import QuantizeOptions, quantize
from fewbit.spec.presets import PRESETS
from tests.tiny_models import save_tiny_model


@pytest.mark.parametrize("scheme", PRESETS.values(), ids=list(PRESETS))
def test_more_effort_reads_at_least_as_much_data(scheme) -> None:  # type: ignore[no-untyped-def]
    means = [means_for(effort, scheme) for effort in EFFORTS]
    chosen = [algorithm(one.algorithm) for one in means]
    data = [one.needs_gram + one.refines_blocks + len(mean.transforms) for one, mean in zip(chosen, means, strict=True)]
    assert data == sorted(data) and data[0] < data[-1]


def test_an_algorithm_that_is_named_wins() -> None:
    assert QuantizeOptions("W4A16", effort="balanced").recipe().algorithm == "gptq"
    recipe = QuantizeOptions("W4A16", effort="best", algorithm="scale-search").recipe()
    assert recipe.algorithm == "scale_search"
    tuned = QuantizeOptions("W4A16", algorithm="gptq", settings={"damping": "0.05"}).recipe()
    assert tuned.settings["damping"] == 0.05 and tuned.settings["act_order"] is True


def test_balanced_takes_the_asymmetric_term_below_eight_bits_unless_told_otherwise() -> None:
    def term(name: str, **given: Any) -> float:
        return float(QuantizeOptions(name, effort="balanced", **given).recipe().settings["asymmetric"])

    assert (term("W4A16"), term("W2A16_ASYM"), term("NVFP4A16"), term("FP8_DYNAMIC")) == (0.25, 0.25, 0.25, 0)
    assert term("W4A16", settings={"asymmetric": "0"}) == term("W4A16", algorithm="gptq") == 0


@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_effort_transforms_what_rounds_inputs_to_integers_and_nothing_else(effort: str) -> None:
    chain = ["smoothquant"] if effort == "balanced" else ["rotation", "smoothquant"]
    for name in PRESETS:
        recipe = QuantizeOptions(name, effort=effort).recipe()
        assert [one["name"] for one in recipe.transforms] == (chain if name == "W8A8" else [])
        assert name != "W8A8" or recipe.algorithm == "gptq"
    assert not QuantizeOptions("W8A8", effort="balanced", algorithm="gptq").recipe().transforms
    asked = QuantizeOptions("W8A8", effort=effort, transforms=("rotation",)).recipe()
    assert [one["name"] for one in asked.transforms] == ["rotation"]


def test_a_model_that_cannot_be_rotated_does_without_and_says_so(tmp_path: Path) -> None:
    rotated = QuantizeOptions("W8A8", effort="best").plan(save_tiny_model(tmp_path / "llama"))
    assert [one["name"] for one in rotated.recipe.transforms] == ["rotation", "smoothquant"] and not rotated.cautions
    source = save_tiny_model(tmp_path / "neox", "gpt_neox")
    plain = QuantizeOptions("W8A8", effort="best").plan(source)
    assert [one["name"] for one in plain.recipe.transforms] == ["smoothquant"]
    assert not plain.unties and "rotation is left out" in plain.cautions[0] and "no RMSNorm" in plain.cautions[0]
    with pytest.raises(ModelError, match="no RMSNorm"):  # what a person names is done, or refused
        quantize(source, tmp_path / "q", "W8A8", transforms=("rotation",), calibration_windows=1, self_samples=0)


def test_an_unknown_effort_is_answered_with_the_closest() -> None:
    with pytest.raises(SchemeError, match="balanced"):
        QuantizeOptions("W4A16", effort="balance").recipe()
