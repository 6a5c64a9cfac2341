"""Sign-gradient rounding of a block of two layers, against its formula in float64 and against GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fewbit.algorithms.gptq import Gptq
from fewbit.algorithms.interface import BlockTask, LayerResult
from fewbit.algorithms.registry import algorithm
from fewbit.numerics import dequantize
from tests.algorithms.layers import FEATURES, OUTPUTS, keys, statistics, task

KEYS = keys()
BATCHES = 4


@cache
def inputs() -> Tensor:
    """[T, K]: features that depend on one another, none of them far larger: sign steps are equal for all weights."""
    generator = torch.Generator().manual_seed(4)
    mix = torch.randn(FEATURES, FEATURES, generator=generator)
    return torch.randn(512, FEATURES, generator=generator) @ mix / FEATURES**0.5


@cache
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    up = torch.randn(OUTPUTS, FEATURES, generator=generator) / FEATURES**0.5
    return {"up": up, "down": torch.randn(FEATURES, OUTPUTS, generator=generator) / OUTPUTS**0.5}


def output(numbers: Mapping[str, Tensor], index: int) -> Tensor:
    x = inputs().chunk(BATCHES)[index].to(numbers["up"].dtype)
    return torch.nn.functional.silu(x @ numbers["up"].T) @ numbers["down"].T


def block(results: Mapping[str, LayerResult], scheme: str = "W4A16") -> BlockTask:
    hidden = torch.nn.functional.silu(inputs() @ weights()["up"].T)
    tasks = {
        "up": task(KEYS[scheme], weights()["up"], statistics()),
        "down": task(KEYS[scheme], weights()["down"], statistics(hidden)),
    }
    named = {name: replace(one, name=name) for name, one in tasks.items()}
    return BlockTask(named, results, BATCHES, output, lambda index: output(weights(), index))


def solved(scheme: str, compensate: bool = True, **settings: object) -> tuple[BlockTask, dict[str, LayerResult]]:
    """The block, its layers by GPTQ or by the nearest codes, and what refining makes of them."""
    first = Gptq({"compensate": compensate})
    start = {name: first.quantize_layers([one])[0] for name, one in block({}, scheme).tasks.items()}
    whole = block(start, scheme)
    return whole, algorithm("sign_round", settings).refine(whole)


def distance(results: Mapping[str, LayerResult]) -> float:
    """As the formula has it, in float64."""
    exact = {name: one.double() for name, one in weights().items()}
    found = {name: dequantize(one.record).double() for name, one in results.items()}
    errors = []
    for index in range(BATCHES):
        target = output(exact, index)
        errors.append(((output(found, index) - target).square().sum(-1) / target.square().sum(-1)).mean())
    return float(torch.stack(errors).mean())


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
def test_the_block_ends_nearer_to_the_model_than_by_the_nearest_codes(scheme: str) -> None:
    whole, refined = solved(scheme, compensate=False, rounding_reach=0.25, scale_reach=0.01)
    assert {one.method for one in refined.values()} == {"sign_round"}
    assert distance(refined) < 0.95 * distance(whole.results)
    for one in refined.values():
        one.record.validate("layer")


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16"])
@pytest.mark.parametrize("iterations", [1, 200])
def test_the_nearer_of_its_result_and_that_of_gptq_is_kept(scheme: str, iterations: int) -> None:
    whole, refined = solved(scheme, iterations=iterations)
    assert distance(refined) <= distance(whole.results) * 1.0001
    if iterations == 1:
        assert refined == whole.results


def test_one_step_is_the_formula() -> None:
    """All offsets move by the rate against the sign of their gradient, which passes rounding straight through."""
    start = {name: Gptq({"compensate": False}).quantize_layers([one])[0] for name, one in block({}).tasks.items()}
    silent = {name: replace(one, weight=one.weight * 0) for name, one in block({}).tasks.items()}
    far = {name: Gptq().quantize_layers([one])[0] for name, one in silent.items()}
    settings = {"iterations": 1, "batches": BATCHES, "rounding_reach": 0.1, "scale_reach": 0.0}
    refined = algorithm("sign_round", settings).refine(block(far))

    numbers = {name: dequantize(one.record).double().requires_grad_() for name, one in start.items()}
    exact = {name: one.double() for name, one in weights().items()}
    for index in range(BATCHES):
        target = output(exact, index)
        ((output(numbers, index) - target).square().sum(-1) / target.square().sum(-1)).mean().backward()
    for name, one in start.items():
        scale = one.record["scale"].double().repeat_interleave(32, 1)[:, : weights()[name].shape[1]]
        codes = one.record["codes"].double()
        base = (exact[name] / scale).clamp(codes - 0.5, codes + 0.5)
        gradient = numbers[name].grad
        assert gradient is not None
        expected = torch.round(base - 0.2 * torch.sign(gradient * scale)).clamp(-8, 7)
        same = (refined[name].record["codes"] == expected).double().mean()
        assert same > 0.999  # a gradient of zero to rounding may have either sign
        assert (refined[name].record["codes"] != codes).any()
