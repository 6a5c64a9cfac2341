"""Perplexity of SmolLM2 on WikiText-2, unquantized and by round to nearest, against figures measured elsewhere.

Weights alone, 16 windows of 1,024 tokens, each scored alone, float32. Half an hour on two cores: `make test-quality`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fewbit.evaluation.perplexity import perplexity
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.numerics import dequantize, quantize
from fewbit.spec.key import QuantKey
from fewbit.spec.recipe import ScaleRules

pytestmark = [pytest.mark.quality, pytest.mark.model]
WINDOWS, LENGTH = 16, 1024
TOLERANCE = 0.005

Score = Callable[[str | None, ScaleRules], float]


@pytest.fixture(scope="module")
def score(smollm2: Path, shared_folder: Path) -> Score:
    """Perplexity with every linear layer but the head quantized by a key, or as it is for None."""
    text = (shared_folder / "data" / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    windows = token_windows(load_tokenizer(smollm2), text, LENGTH, WINDOWS)
    model: PreTrainedModel = load(smollm2, device="cpu", dtype=torch.float32)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {name: module.weight.data for name, module in layers.items() if name != "lm_head"}

    def measure(key: str | None, rules: ScaleRules = ScaleRules()) -> float:
        for name, weight in weights.items():
            layers[name].weight.data = (
                weight if key is None else dequantize(quantize(weight, QuantKey.parse(key), rules))
            )
        return perplexity(model, windows)

    return measure


@pytest.mark.parametrize(
    ("key", "rules", "expected"),
    [
        (None, ScaleRules(), 19.88),
        ("int4:group64:f32", ScaleRules(), 27.73),
        ("int4:asym:group32:f32", ScaleRules(), 23.92),
        ("e2m1:group16:e4m3/tensor:f32", ScaleRules(), 24.51),
        ("e2m1:group32:e8m0", ScaleRules(mx="floor"), 33.45),
        ("e4m3:channel:f32", ScaleRules(), 20.25),
    ],
    ids=["unquantized", "int4 g64", "int4 asym g32", "NVFP4", "MXFP4 floor", "FP8 channel"],
)
def test_perplexity_is_what_others_measure(score: Score, key: str | None, rules: ScaleRules, expected: float) -> None:
    assert score(key, rules) == pytest.approx(expected, rel=TOLERANCE)
