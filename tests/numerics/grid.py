"""An element's grid worked out on its own: from the table of values, in float64, one comparison at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from fewbit.numerics import QuantizedTensor, decode
from fewbit.spec import ELEMENTS, Element
from fewbit.spec.element import E4M3, E5M2

SMALL = [element for element in ELEMENTS.values() if element.bits <= 8]

# FP8 by the rule for elements that torch has no dtype for, so that the rule meets torch's own cast.
BY_RULE = {
    replace(E4M3, name="e4m3 by rule"): torch.float8_e4m3fn,
    replace(E5M2, name="e5m2 by rule"): torch.float8_e5m2,
}


@cache
def grid(element: Element) -> Tensor:
    """The finite numbers of an element in rising order, float64, zero once."""
    values = torch.tensor(element.values, dtype=torch.float64)
    return values[values.isfinite()].unique()


def distance_to_grid(numbers: Tensor, element: Element) -> Tensor:
    """How far each of float64 `numbers` is from the nearest number of the element."""
    values = grid(element)
    above = torch.searchsorted(values, numbers).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    return torch.minimum((values[above] - numbers).abs(), (values[below] - numbers).abs())


def spread(scale: Tensor, record: QuantizedTensor) -> Tensor:
    """Scales [..., R', C'] repeated over the numbers they cover, float64 of the record's shape."""
    rows, columns = record.key.granularity.extents(record.shape)
    whole = scale.double().repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return whole[..., : record.shape[-2], : record.shape[-1]]


def steps_of(numbers: Tensor, record: QuantizedTensor, scale: Tensor) -> Tensor:
    """`numbers` in the units of the element's grid, float64: where rounding happens."""
    steps = numbers.double() / spread(scale, record)
    if "zero_point" in record:
        steps = steps + spread(decode(record["zero_point"], record.key.element), record)
    return steps
