"""Signal-to-noise of every grid on a million random numbers, against published targets.

The targets were computed by other code from the formulas alone; a scale rule that is subtly off moves them by more
than the tolerance.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from fewbit.numerics import dequantize, quantize
from fewbit.spec import QuantKey, ScaleRules

SAMPLES, ROW = 1 << 20, 4096
TOLERANCE = 0.15
# A row of 4096 takes its scale from its one largest number, so heavy tails leave much to chance: over 24 seeds the
# standard deviation is 0.08 and 0.37.
CHANCE = {("int8:channel:f32", "laplace"): 0.25, ("int8:channel:f32", "student"): 1.0}

# key, rules: decibels over N(0, 1), Laplace, Student t(5)
TARGETS = [
    (
        "int8:channel:f32",
        {},
        (41.3, 36.8, 33.9),
    ),  # published 36.7 and 34.0 for the last two; these are means of 24 seeds
    ("int6:group128:f32", {}, (31.6, 28.8, 28.2)),
    ("int5:group128:f32", {}, (25.4, 22.6, 22.1)),
    ("int4:group128:f32", {}, (19.1, 16.4, 15.8)),
    ("int3:group128:f32", {}, (12.5, 10.1, 9.4)),
    ("int4:group32:f32", {}, (20.5, 18.5, 18.4)),
    ("int4:asym:group128:f32", {}, (19.95, 17.7, 17.5)),
    ("int4:asym:group32:f32", {}, (21.9, 20.5, 20.6)),
    ("int2:asym:group64:f32", {}, (6.8, 6.0, 5.6)),
    ("e2m1:group16:e4m3/tensor:f32", {}, (20.4, 20.7, 20.7)),
    ("e2m1:group32:e8m0", {"mx": "floor"}, (18.8, 17.9, 18.0)),
    ("e2m1:group32:e8m0", {"mx": "even"}, (19.0, 18.1, 18.2)),
    ("e2m1:group32:e8m0", {"mx": "ceil"}, (18.8, 17.6, 17.5)),
    ("e4m3:channel:f32", {}, (31.5, 31.6, 31.6)),
    ("e4m3:tensor:f32", {}, (31.5, 31.6, 31.6)),
    ("e4m3:group32:e8m0", {"mx": "floor"}, (30.6, 30.0, 30.1)),
]


@cache
def _samples(distribution: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(SAMPLES, generator=generator)
    if distribution == "laplace":
        uniform = torch.rand(SAMPLES, generator=generator, dtype=torch.float64) - 0.5
        normal = (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()
    elif distribution == "student":
        chi_squared = torch.randn(5, SAMPLES, generator=generator).square().sum(0)
        normal = normal / (chi_squared / 5).sqrt()
    return normal.reshape(-1, ROW)


def _decibels(numbers: Tensor, back: Tensor) -> float:
    error = (numbers.double() - back.double()).square().sum()
    return 10 * math.log10(numbers.double().square().sum().item() / error.item())


@pytest.mark.parametrize(
    ("key", "rules", "targets"), TARGETS, ids=lambda part: str(part) if isinstance(part, str) else ""
)
@pytest.mark.parametrize("distribution", ["normal", "laplace", "student"])
def test_signal_to_noise(key: str, rules: dict[str, str], targets: tuple[float, ...], distribution: str) -> None:
    target = targets[["normal", "laplace", "student"].index(distribution)]
    numbers = _samples(distribution)
    back = dequantize(quantize(numbers, QuantKey.parse(key), ScaleRules(**rules)))
    assert _decibels(numbers, back) == pytest.approx(target, abs=CHANCE.get((key, distribution), TOLERANCE))


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_the_symmetric_grid_of_the_restricted_rule_costs_quality(bits: int) -> None:
    numbers, key = _samples("normal"), QuantKey.parse(f"int{bits}:group128:f32")
    full, restricted = (
        _decibels(numbers, dequantize(quantize(numbers, key, ScaleRules(integer=rule))))
        for rule in ("full", "restricted")
    )
    assert full > restricted + 0.1


@pytest.mark.parametrize(
    ("key", "stored"), [("int4:group128:f32", "f16"), ("int4:group128:f32", "bf16"), ("e4m3:channel:f32", "bf16")]
)
def test_storing_scales_in_16_bits_costs_nothing_to_speak_of(key: str, stored: str) -> None:
    # True only because codes are computed from the stored scale.
    numbers = _samples("normal")
    exact, rounded = (
        _decibels(numbers, dequantize(quantize(numbers, QuantKey.parse(text))))
        for text in (key, key.replace("f32", stored))
    )
    assert rounded == pytest.approx(exact, abs=0.03)
