"""AWQ: input features that matter are made larger before rounding, and what feeds them smaller by as much.

Scales are a power of the mean magnitude of each feature, divided by a power of the mean relative magnitude of its
weights (duo scaling). The loss of each candidate is the error of the consumers' outputs, trace(E H E^T) with H the mean
outer product of the input and E what quantizing does to the scaled weight, unscaled again; relative to the output,
summed over the consumers. Codes are chosen by the algorithm that will choose them in the end, on some of the rows:
scales that help rounding to nearest often harm GPTQ. No forward pass is needed, and where no candidate is better than
no scaling at all, none is done.

Sources: Lin et al., AWQ (arXiv 2306.00978); AutoAWQ 0.2.9 and llm-compressor 0.14 for the grid, duo scaling and the
normalization; `algorithms.md` section 3 of the house's references.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.algorithms.interface import Algorithm, LayerTask, relative_loss
from fewbit.errors import SchemeError
from fewbit.models.quantization.transforms.interface import Consumer, Scaling, ScalingTask, Transform
from fewbit.numerics import dequantize
from fewbit.numerics.blocks import from_blocks, over_blocks, to_blocks
from fewbit.numerics.ranges import global_scale_of

SMALLEST = 1e-4
"""Statistics and scales are at least this."""

_DUO = ("no", "yes", "both")


@dataclass(frozen=True)
class AwqSettings:
    """Settings of AWQ.

    Attributes:
        points: candidates beside no scaling at all.
        duo: whether scales are divided by a power of the weights' magnitudes: `no`, `yes`, or `both` for half of the
            points each.
        rows: of the consumers' weights, on which candidates are tried.
        patience: candidates in a row, of growing powers, that lose to one before them until no more are tried; 0 tries
            all.
    """

    points: int = 20
    duo: str = "both"
    rows: int = 512
    patience: int = 2

    def __post_init__(self) -> None:
        for name in ("points", "rows"):
            if getattr(self, name) < 1:
                raise SchemeError(f"awq: {name} is {getattr(self, name)}.", "Use at least 1.")
        if self.patience < 0:
            raise SchemeError(f"awq: patience is {self.patience}.", "Use 0 (try all) or more.")
        if self.duo not in _DUO:
            raise SchemeError(f"awq: duo is {self.duo!r}.", f"Use one of {', '.join(_DUO)}.")


class Awq(Transform):
    """See the head of this file."""

    name: ClassVar[str] = "awq"
    Settings: ClassVar[type] = AwqSettings
    needs_statistics: ClassVar[bool] = True
    scales_values: ClassVar[bool] = True

    def choose(self, task: ScalingTask) -> Scaling:
        trial = _Trial.of(task, self.settings.rows)
        plain = trial.loss(None)
        best = Scaling(None, "none", plain, plain)
        for chain in self._chains(task):
            lowest, worse = float("inf"), 0
            for choice, columns in chain:
                loss = trial.loss(columns)
                worse = 0 if loss < lowest else worse + 1
                lowest = min(lowest, loss)
                if loss < best.loss:
                    best = Scaling(columns, choice, loss, plain)
                if worse and worse == self.settings.patience:
                    break
        return best

    def _chains(self, task: ScalingTask) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Candidates of growing powers of the activations: alone, and with the weights."""
        activations = task.tied(task.seen.statistics.mean_magnitude)
        weights = task.tied(relative_magnitude(task.quantized))
        points, duo = self.settings.points, self.settings.duo
        plain = 0 if duo == "yes" else points if duo == "no" else (points + 1) // 2
        powers = [index / plain for index in range(1, plain + 1)]
        yield ((f"activations^{r:.3g}", normalized(activations.clamp(min=SMALLEST) ** r)) for r in powers)
        powers = [index / (points - plain) for index in range(points - plain)]
        yield (
            (
                f"activations^{r:.3g} / weights^{1 - r:.3g}",
                normalized(activations.clamp(min=SMALLEST) ** r / (weights ** (1 - r) + SMALLEST)),
            )
            for r in powers
        )


def relative_magnitude(consumers: list[Consumer]) -> Tensor:
    """Mean over the rows of all consumers of each weight's magnitude over the largest of its group, float32 [K]."""
    total, count = torch.zeros_like(consumers[0].weight[0]), 0
    for one in consumers:
        assert one.key is not None
        blocks = to_blocks(one.weight.abs(), one.key.weight.granularity)
        largest = over_blocks(blocks.amax(dim=(-3, -1))).clamp(min=SMALLEST**2)
        total += from_blocks(blocks / largest, tuple(one.weight.shape)).sum(dim=0)
        count += len(one.weight)
    return total / count


def normalized(scales: Tensor) -> Tensor:
    """Scales around one: divided by the geometric mean of the largest and the smallest; what is not finite is one."""
    scales = torch.nan_to_num(scales, nan=1.0, posinf=1.0).clamp(min=SMALLEST)
    return scales / (scales.amax() * scales.amin()).sqrt()


@dataclass(frozen=True)
class _Trial:
    """Consumers of one mapping, some of their rows, on which candidates are judged.

    Attributes:
        algorithm: what chooses the codes in a trial.
        rows: of each consumer, [N', K].
    """

    task: ScalingTask
    algorithm: Algorithm
    rows: list[Tensor]

    @classmethod
    def of(cls, task: ScalingTask, rows: int) -> _Trial:
        """A trial with about `rows` rows in all, evenly spread; all of them where rows share scales."""
        total = sum(len(one.weight) for one in task.quantized)
        chosen = []
        for one in task.quantized:
            assert one.key is not None
            alone = one.key.weight.granularity.extents(tuple(one.weight.shape))[0] == 1
            chosen.append(one.weight[:: max(1, total // rows)] if alone else one.weight)
        return cls(task, task.algorithm.for_trials(), chosen)

    def loss(self, columns: Tensor | None) -> float:
        """Relative output error of the consumers, each weighted by its share of the tokens."""
        statistics = self.task.seen.statistics
        scales = self.task.seen.largest.new_ones(()) if columns is None else columns
        if columns is not None:
            statistics = replace(statistics, sample=None).divided(columns)
        tasks = []
        for one, rows in zip(self.task.quantized, self.rows, strict=True):
            assert one.key is not None
            second = None
            if one.key.weight.global_scale is not None:
                second = global_scale_of((one.weight * scales).abs().amax().reshape(1, 1), one.key.weight)
            tasks.append(LayerTask("", rows * scales, one.key, self.task.rules, second, statistics))
        total, gram = 0.0, statistics.gram
        for one, layer, result in zip(self.task.quantized, tasks, self.algorithm.quantize_layers(tasks), strict=True):
            total += one.share * (relative_loss(layer.weight, dequantize(result.record), gram) or 0.0)
        return total
