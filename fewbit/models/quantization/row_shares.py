"""Layers solved by several processes, each of which takes a share of every layer's rows: these are independent.

Where a scale covers several rows, or there are fewer rows than processes, one process takes the whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fewbit.algorithms.curvature import output_loss
from fewbit.algorithms.interface import LayerResult, LayerTask
from fewbit.numerics.join import join
from fewbit.numerics.ranges import global_scale_of
from fewbit.spec.granularity import TENSOR


@dataclass(frozen=True)
class RowShare:
    """What one process made of its rows of a layer, on the CPU.

    Attributes:
        result: of these rows.
        energy: sum over them of the mean square of their outputs, which their loss is relative to.
    """

    result: LayerResult
    energy: float


def rows_of(task: LayerTask, rank: int, count: int, turn: int) -> LayerTask | None:
    """The rows of a layer that process `rank` of `count` solves; None where it has none.

    Args:
        task: the whole layer.
        rank, count: of the processes.
        turn: number of the layer among those of its input, which says whose it is where it cannot be divided.
    """
    key, rows = task.key.weight, len(task.weight)
    if key.granularity.extents(tuple(task.weight.shape))[0] != 1 or rows < count:
        return task if turn % count == rank else None
    second = task.global_scale
    if second is None and key.global_scale is not None and key.global_scale.granularity == TENSOR:
        second = global_scale_of(task.weight.abs().amax().float().reshape(1, 1), key)
    return replace(task, weight=task.weight[rows * rank // count : rows * (rank + 1) // count], global_scale=second)


def share_of(task: LayerTask, result: LayerResult) -> RowShare:
    """The result for a task that `rows_of` gave, to be sent."""
    energy, statistics = 1.0, task.statistics
    if result.loss is not None and statistics is not None:
        energy = float(output_loss(task.weight.float(), statistics.gram.to(task.weight.device)).sum())
    return RowShare(replace(result, record=result.record.to("cpu")), energy)


def put_together(shares: Sequence[RowShare]) -> LayerResult:
    """The result for the whole layer, from its rows in their order."""
    results = [share.result for share in shares]
    if len(results) == 1:
        return results[0]
    method = "; ".join(dict.fromkeys(result.method for result in results))
    remarks = tuple(dict.fromkeys(remark for result in results for remark in result.remarks))
    losses = [result.loss for result in results if result.loss is not None]
    whole = sum(share.energy for share in shares)
    loss = None
    if len(losses) == len(results):
        parts = sum(own * share.energy for own, share in zip(losses, shares, strict=True))
        loss = parts / whole if whole > 0 else 0.0
    return LayerResult(join([result.record for result in results]).record, method, loss, remarks)
