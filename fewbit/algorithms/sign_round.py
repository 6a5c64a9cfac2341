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
from fewbit.numerics.cast import nearest


@dataclass(frozen=True)
class SignRoundSettings(GptqSettings):
    """Settings of GPTQ, which it is measured against, and its own.

    Attributes:
        iterations: steps of gradient descent for each block.
        batches: batches of calibration windows that each step reads, of each process.
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
        stacks = _stacks(
            (task, result)
            for tasks in _by_input(block.tasks.values())
            for task, result in zip(tasks, self._nearest(tasks), strict=True)
        )
        error = _RelativeError(block)
        generator = torch.Generator().manual_seed(0)
        iterations, count = self.settings.iterations, min(self.settings.batches, block.batches)
        for step in range(iterations):
            rate = 2 * (1 - step / iterations) / iterations  # these add up to 1
            weights = {name: weight for stack in stacks for name, weight in stack.tuned(block.dtype).items()}
            for batch in torch.randperm(block.batches, generator=generator)[:count].tolist():
                with torch.enable_grad():
                    error.of(weights, batch).backward()
            for stack in stacks:
                block.total(stack.gradient)
                stack.step(self.settings.rounding_reach * rate, self.settings.scale_reach * rate)
        compensated = {name: _meaning(result) for name, result in block.results.items()}
        if not error.mean({k: w for stack in stacks for k, w in stack.final().items()}) < error.mean(compensated):
            return dict(block.results)
        return {name: result for stack in stacks for name, result in stack.results(self.name).items()}

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


def _stacks(pairs: Iterable[tuple[LayerTask, LayerResult]]) -> list[_Stack]:
    """Layers of one key together, where each of their scales is one of so many numbers of a row."""
    found: dict[object, list[tuple[LayerTask, LayerResult]]] = {}
    for task, result in pairs:
        height, width = task.key.weight.granularity.extents(tuple(task.weight.shape))
        alike = height == 1 and task.weight.shape[1] % width == 0 and "order" not in result.record
        found.setdefault((task.key.weight, width) if alike else task.name, []).append((task, result))
    return [_Stack(layers) for layers in found.values()]


class _Stack:
    """Layers whose offsets and factors are tuned as one: few operations, each over all of them.

    Attributes:
        gradient: of the weights that `tuned` gave, one layer after the other.
    """

    def __init__(self, layers: list[tuple[LayerTask, LayerResult]]) -> None:
        self.tasks = [task for task, _ in layers]
        self.scales = [Scales.of(result.record) for _, result in layers]
        self.shapes = [tuple(task.weight.shape) for task in self.tasks]
        self.element = self.scales[0].key.element
        grids = [scales.grid(shape) for scales, shape in zip(self.scales, self.shapes, strict=True)]
        zeros = [grid.zero for grid in grids if grid.zero is not None]
        self.grid = Grid(self.element, _flat([grid.scale for grid in grids]), _flat(zeros) if zeros else None)
        self.values = _flat([decode(result.record["codes"], self.element) for _, result in layers])
        steps = _flat([task.weight.float() for task in self.tasks]) / self.grid.scale
        if self.grid.zero is not None:
            steps += self.grid.zero
        self.base = torch.clamp(steps, self.values - 0.5, self.values + 0.5)
        self.offset = torch.zeros_like(self.base)
        self.factor = torch.ones_like(_flat([scales.scale for scales in self.scales]), dtype=torch.float32)
        self.tunes_scales = self.scales[0].key.scale.element.bits >= 16
        self.signs = self.grid.scale.sign()
        self.gradient = torch.empty(0)

    def tuned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights as they are now, leaves [N, K] of that dtype."""
        self.values = nearest(self.base + self.offset, self.element)
        self.unscaled = self.grid.meaning(self.values)
        weights = (self._scaled(self.unscaled) if self.tunes_scales else self.unscaled).to(dtype)
        self.gradient = torch.zeros_like(weights)
        leaves = {}
        for task, weight, slope in zip(self.tasks, self._parted(weights), self._parted(self.gradient), strict=True):
            leaves[task.name] = weight.detach().requires_grad_()
            leaves[task.name].grad = slope
        return leaves

    def step(self, rate: float, scale_rate: float) -> None:
        """One step down the sign of the gradient."""
        if self.tunes_scales:
            self.factor.sub_(self._gathered(self.gradient * self.unscaled).sign_(), alpha=scale_rate)
        self.offset.addcmul_(self.gradient.sign_(), self.signs, value=-rate).clamp_(-0.5, 0.5)

    def final(self) -> dict[str, Tensor]:
        """The weights with scales as they will be stored, float32 [N, K]."""
        self.values = nearest(self.base + self.offset, self.element)
        if self.tunes_scales:
            stored = self.scales[0].key.scale.element
            factors = self.factor.split([scales.scale.numel() for scales in self.scales])
            self.scales = [
                replace(one, scale=encode(decode(one.scale, stored) * factor.view_as(one.scale), stored))
                for one, factor in zip(self.scales, factors, strict=True)
            ]
        self.grids = [scales.grid(shape) for scales, shape in zip(self.scales, self.shapes, strict=True)]
        found = zip(self.tasks, self.grids, self._parted(self.values), strict=True)
        return {task.name: grid.meaning(values) for task, grid, values in found}

    def results(self, method: str) -> dict[str, LayerResult]:
        """What `final` gave."""
        found = {}
        layers = zip(self.tasks, self.scales, self.grids, self._parted(self.values), strict=True)
        for task, scales, grid, values in layers:
            statistics = task.statistics
            gram = None if statistics is None or statistics.products is None else statistics.gram
            loss = relative_loss(task.weight.float(), grid.meaning(values), gram)
            found[task.name] = LayerResult(scales.record(values), method, loss)
        return found

    def _parted(self, numbers: Tensor) -> list[Tensor]:
        """Numbers of all layers -> those of each, [N, K]."""
        parts = numbers.split([height * width for height, width in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def _scaled(self, numbers: Tensor) -> Tensor:
        """Numbers times the factors of their scales."""
        if len(self.tasks) == 1:
            factor = self.factor.view_as(self.scales[0].scale)
            return numbers * self.scales[0].spread(factor, self.shapes[0]).reshape(-1)
        return (numbers.view(len(self.factor), -1) * self.factor[:, None]).flatten()

    def _gathered(self, numbers: Tensor) -> Tensor:
        """The sum of numbers under each scale."""
        if len(self.tasks) == 1:
            return self.scales[0].gathered(numbers.view(self.shapes[0])).flatten()
        return numbers.view(len(self.factor), -1).sum(dim=1)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class _RelativeError:
    """Mean over tokens of |output - target|^2 / |target|^2, `output` being the block's for some weights."""

    def __init__(self, block: BlockTask) -> None:
        self._block = block
        tiny = torch.finfo(torch.float32).tiny
        sizes = [block.target(index).float().square().sum(dim=-1) for index in range(block.batches)]
        self._shares = [1 / size.clamp(min=tiny) / size.numel() for size in sizes]

    def of(self, weights: Mapping[str, Tensor], index: int) -> Tensor:
        """On one batch."""
        difference = self._block.output(weights, index).float() - self._block.target(index).float()
        return (difference.square().sum(dim=-1) * self._shares[index]).sum()

    def mean(self, weights: Mapping[str, Tensor]) -> float:
        """Over all batches, of all processes."""
        with torch.no_grad():
            errors = torch.stack([self.of(weights, index) for index in range(self._block.batches)])
        counted = torch.stack([errors.sum(), torch.full_like(errors[0], len(errors))])
        self._block.total(counted)
        return float(counted[0] / counted[1])
