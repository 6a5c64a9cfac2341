"""Small layers with correlated inputs, on which what an algorithm is worth shows."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fewbit.algorithms.interface import LayerTask
from fewbit.algorithms.statistics import InputStatistics
from fewbit.spec.element import BF16
from fewbit.spec.granularity import group
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import PRESETS

FEATURES, OUTPUTS, TOKENS = 96, 40, 2048


def keys() -> dict[str, LinearKey]:
    """Every preset's key, integer groups being of 32."""
    found = {}
    for name, scheme in PRESETS.items():
        own = scheme.rules[0].key
        grouped = own.weight.granularity.kind == "group" and own.weight.element.is_integer
        sized = scheme.with_granularity(group(32)) if grouped else scheme
        found[name] = sized.with_scale_element(BF16).rules[0].key
    return found


@cache
def inputs() -> Tensor:
    """[T, K]: features that depend on one another, one of them twenty times larger."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(FEATURES, FEATURES, generator=generator) * torch.rand(FEATURES, 1, generator=generator) ** 3
    x = torch.randn(TOKENS, FEATURES, generator=generator) @ mix / FEATURES**0.5
    x[:, 5] *= 20
    return x


@cache
def weight() -> Tensor:
    """[N, K] bf16."""
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(OUTPUTS, FEATURES, generator=generator) / FEATURES**0.5).bfloat16()


def statistics(x: Tensor | None = None) -> InputStatistics:
    """Of `inputs`, or of x [T, K]."""
    x = inputs() if x is None else x
    gathered = InputStatistics.empty(x.shape[-1])
    gathered.add(x)
    return gathered


def task(key: LinearKey, numbers: Tensor | None = None, seen: InputStatistics | None = None) -> LayerTask:
    """A layer of `weight` and `inputs`."""
    return LayerTask("layer", weight() if numbers is None else numbers, key, statistics=seen or statistics())
