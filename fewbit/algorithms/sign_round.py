"""Sign-gradient rounding: the codes and scales of a whole block are tuned together, by gradients of its output.

It starts from the nearest codes on searched scales. Every weight gets an offset of at most half a step before it is
rounded, every group a factor on its scale, and both move by the sign of their gradient, rounding being passed
straight through. What is minimized is the distance of the block's output from that of the unquantized model, on what
the quantized blocks before it put out, relative to the size of each token's state: the norm at the head of the next
block divides by that size. GPTQ is run as well, and of the two results the nearer one over all calibration windows is
kept: on SmolLM2 that is GPTQ's in the first two blocks. Tuning from GPTQ's codes instead gains next to nothing: they
are a minimum already.

Sources: Cheng et al., SignRound (arXiv 2309.05516) and AutoRound 0.16: a rate that falls linearly, offsets within
half a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.algorithms.gptq import Gptq, GptqSettings
from fewbit.algorithms.grid import Grid, Scales
from fewbit.algorithms.interface import BlockTask, LayerResult, LayerTask, relative_loss
from fewbit.numerics import decode, encode


@dataclass(frozen=True)
class SignRoundSettings(GptqSettings):
    """Settings of GPTQ, which it is measured against, and its own.

    Attributes:
        iterations: steps of gradient descent for each block.
        batches: batches of calibration windows that each step reads.
        rounding_reach: how far an offset may move in all, in steps.
        scale_reach: how far a scale may move in all, as a fraction of it.
    """

    iterations: int = 200
    batches: int = 2
    rounding_reach: float = 1.0
    scale_reach: float = 0.1


class SignRound(Gptq):
    """See the head of this file."""

    name: ClassVar[str] = "sign_round"
    Settings: ClassVar[type] = SignRoundSettings
    refines_blocks: ClassVar[bool] = True

    def refine(self, block: BlockTask) -> dict[str, LayerResult]:
        tuned = {
            task.name: _Tuned(task, result)
            for tasks in _by_input(block.tasks.values())
            for task, result in zip(tasks, self._nearest(tasks), strict=True)
        }
        generator = torch.Generator().manual_seed(0)
        iterations, count = self.settings.iterations, min(self.settings.batches, block.batches)
        for step in range(iterations):
            rate = 2 * (1 - step / iterations) / iterations  # these add up to 1
            weights = {name: one.weight().requires_grad_() for name, one in tuned.items()}
            for batch in torch.randperm(block.batches, generator=generator)[:count].tolist():
                with torch.enable_grad():
                    _relative_error(block.output(weights, batch), block.target(batch)).backward()
            for name, one in tuned.items():
                gradient = weights[name].grad
                if gradient is not None:
                    one.step(gradient, self.settings.rounding_reach * rate, self.settings.scale_reach * rate)
        compensated = {name: _meaning(result) for name, result in block.results.items()}
        if not _distance(block, {name: one.final() for name, one in tuned.items()}) < _distance(block, compensated):
            return dict(block.results)
        return {name: one.result(self.name) for name, one in tuned.items()}

    def _nearest(self, tasks: list[LayerTask]) -> list[LayerResult]:
        """The nearest codes on searched scales, for layers that read one input."""
        own = {name: getattr(self.settings, name) for name in Gptq().settings_by_name}
        return Gptq(own | {"compensate": False, "sweeps": 0}).quantize_layers(tasks)


def _by_input(tasks: Iterable[LayerTask]) -> list[list[LayerTask]]:
    """Tasks by the statistics that they share."""
    found: dict[int, list[LayerTask]] = {}
    for task in tasks:
        found.setdefault(id(task.statistics), []).append(task)
    return list(found.values())


def _meaning(result: LayerResult) -> Tensor:
    """The weight that a result stands for, float32 [N, K]."""
    record = result.record
    values = decode(record["codes"], record.key.element)
    return Scales.of(record).grid(tuple(values.shape)).meaning(values)


class _Tuned:
    """One layer's offsets and factors."""

    def __init__(self, task: LayerTask, result: LayerResult) -> None:
        self.task, self.scales = task, Scales.of(result.record)
        self.target = task.weight.float()
        self.shape = tuple(self.target.shape)
        self.grid = self.scales.grid(self.shape)
        values = decode(result.record["codes"], result.record.key.element)
        steps = self.target / self.grid.scale
        if self.grid.zero is not None:
            steps += self.grid.zero
        self.base = torch.clamp(steps, values - 0.5, values + 0.5)
        self.offset = torch.zeros_like(values)
        self.factor = torch.ones(self.scales.scale.shape, device=values.device)
        self.values = values

    def weight(self) -> Tensor:
        """The weight as it is now, float32 [N, K]."""
        unit = Grid(self.grid.element, torch.ones((), device=self.base.device))
        self.values = unit.rounded(self.base + self.offset)[0]
        return self.grid.meaning(self.values) * self.scales.spread(self.factor, self.shape)

    def step(self, gradient: Tensor, rate: float, scale_rate: float) -> None:
        """One step down the sign of the gradient of the weight."""
        slope = gradient * self.grid.scale
        self.offset.sub_(slope.sign(), alpha=rate).clamp_(-0.5, 0.5)
        if self.scales.key.scale.element.bits >= 16:
            slope = self.scales.gathered(gradient * self.grid.meaning(self.values))
            self.factor.sub_(slope.sign(), alpha=scale_rate)

    def final(self) -> Tensor:
        """The weight with scales as they will be stored."""
        self.weight()
        stored = self.scales.key.scale.element
        if stored.bits >= 16:
            scale = encode(decode(self.scales.scale, stored) * self.factor, stored)
            self.scales, self.factor = replace(self.scales, scale=scale), torch.ones_like(self.factor)
            self.grid = self.scales.grid(self.shape)
        return self.grid.meaning(self.values)

    def result(self, method: str) -> LayerResult:
        statistics = self.task.statistics
        gram = None if statistics is None or statistics.products is None else statistics.gram
        loss = relative_loss(self.target, self.grid.meaning(self.values), gram)
        return LayerResult(self.scales.record(self.values), method, loss)


def _distance(block: BlockTask, weights: Mapping[str, Tensor]) -> float:
    """Mean over all batches."""
    with torch.no_grad():
        errors = [_relative_error(block.output(weights, index), block.target(index)) for index in range(block.batches)]
    return float(torch.stack(errors).mean())


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean over tokens of |output - target|^2 / |target|^2."""
    size = target.float().square().sum(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((output.float() - target.float()).square().sum(dim=-1) / size).mean()
