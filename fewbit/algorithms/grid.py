"""The grid of a weight: which numbers each of its entries may become once scales and zero points are chosen.

The solvers of this folder work on a grid and know nothing of formats: integers, FP4 and FP8 with any scales look alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.numerics import QuantizedTensor, decode, effective_scale, encode, quantize
from fewbit.numerics.blocks import from_blocks, over_blocks, to_blocks
from fewbit.numerics.cast import nearest
from fewbit.spec.element import Element
from fewbit.spec.key import QuantKey
from fewbit.spec.recipe import ScaleRules


@dataclass(frozen=True)
class Scales:
    """The scales of one weight as they are stored.

    Attributes:
        key: the weight's.
        scale: codes of the scale element, [N', K'].
        zero_point: codes of zero, [N', K'], for asymmetric keys.
        global_scale: float64 [1, 1], for keys with a second level.
        order: group of each input feature, int32 [K]; None where groups are of neighbours.
    """

    key: QuantKey
    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def nearest(cls, weight: Tensor, key: QuantKey, rules: ScaleRules, global_scale: Tensor | None) -> Scales:
        """The scales that round to nearest has; see `fewbit.numerics.quantize`."""
        return cls.of(quantize(weight, key, rules, global_scale))

    @classmethod
    def of(cls, record: QuantizedTensor) -> Scales:
        """The scales of a plain record."""
        tensors = record.tensors
        found = {role: tensors[role] for role in ("scale", "zero_point", "global_scale", "order") if role in tensors}
        return cls(record.key, **found)  # type: ignore[arg-type] - a plain record holds tensors

    def record(self, values: Tensor) -> QuantizedTensor:
        """The record of a weight with these scales and the element's numbers `values` [N, K]."""
        tensors = {"codes": encode(values, self.key.element), "scale": self.scale}
        if self.zero_point is not None:
            tensors["zero_point"] = self.zero_point
        if self.global_scale is not None:
            tensors["global_scale"] = self.global_scale
        if self.order is not None:
            tensors["order"] = self.order
        return QuantizedTensor(self.key, tuple(values.shape), tensors)

    def multipliers(self) -> Tensor:
        """First-level scales times the global scale, float32 [N', K']."""
        tensors = {"scale": self.scale} | ({} if self.global_scale is None else {"global_scale": self.global_scale})
        return effective_scale(QuantizedTensor(self.key, tuple(self.scale.shape), tensors))

    def grid(self, shape: tuple[int, ...]) -> Grid:
        """The grid of a weight of `shape` [N, K]."""
        zero = None if self.zero_point is None else self.spread(decode(self.zero_point, self.key.element), shape)
        return Grid(self.key.element, self.spread(self.multipliers(), shape), zero)

    def spread(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """One number per scale [N', K'] -> the same for every entry of a weight of `shape` [N, K]."""
        if self.order is not None:
            return scale[:, self.order.long()]
        like = to_blocks(scale.new_empty(1).expand(shape), self.key.granularity)
        return from_blocks(over_blocks(scale).expand_as(like), shape)

    def columns(self, shape: tuple[int, ...], order: Tensor) -> Grid:
        """The grid of the transposed weight of `shape` [N, K] with its input features in another order, contiguous."""
        height, width = self.key.granularity.extents(shape)
        places = order // width if self.order is None else self.order.long()[order]
        rows = torch.arange(shape[0], device=order.device) // height

        def spread(numbers: Tensor) -> Tensor:
            found = numbers.T[places]
            return found if height == 1 else found[:, rows]

        zero = None if self.zero_point is None else spread(decode(self.zero_point, self.key.element))
        return Grid(self.key.element, spread(self.multipliers()), zero)

    def gathered(self, numbers: Tensor) -> Tensor:
        """The sum of `numbers` [N, K] under each scale, [N', K']."""
        if self.order is not None:
            return torch.zeros_like(self.scale, dtype=numbers.dtype).index_add_(1, self.order.long(), numbers)
        return to_blocks(numbers, self.key.granularity).sum(dim=(-3, -1))


@dataclass(frozen=True)
class Grid:
    """Entry (n, k) becomes `(value - zero[n, k]) * scale[n, k]`, `value` a number of `element`.

    Attributes:
        element: whose numbers are chosen.
        scale: float32 [N, K] or anything that broadcasts with what is rounded.
        zero: the same for the zero points; None for symmetric keys.
    """

    element: Element
    scale: Tensor
    zero: Tensor | None = None

    def rounded(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(values, what they stand for) nearest to `numbers`, which are left alone."""
        steps = numbers / self.scale
        if self.zero is not None:
            steps += self.zero
        values = nearest(steps, self.element)
        return values, self.meaning(values)

    def meaning(self, values: Tensor) -> Tensor:
        """The weights that `values` stand for."""
        return (values if self.zero is None else values - self.zero) * self.scale

    def row(self, index: int) -> Grid:
        """The grid of one row."""
        return Grid(self.element, self.scale[index], None if self.zero is None else self.zero[index])

    def rows(self, first: int, last: int) -> Grid:
        """The grid of some rows."""
        return Grid(self.element, self.scale[first:last], None if self.zero is None else self.zero[first:last])


def stacked(grids: list[Grid], dim: int = 0) -> Grid:
    """Grids of one element over the same input features, one below the other; transposed ones along `dim` 1."""
    zeros = [grid.zero for grid in grids]
    zero = None
    if any(entry is not None for entry in zeros):
        parts = [torch.zeros_like(grid.scale) if grid.zero is None else grid.zero for grid in grids]
        zero = torch.cat(parts, dim)
    return Grid(grids[0].element, torch.cat([grid.scale for grid in grids], dim), zero)
