"""Codes, scales and zero points in the shapes that kernels take them in."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.errors import CheckpointError
from fewbit.numerics import QuantizedTensor, code_dtype, decode, effective_scale


def spread(values: Tensor, record: QuantizedTensor, columns: int) -> Tensor:
    """[R', C'] of any granularity -> [N, K // columns]: one value for each row and each `columns` input features.

    Args:
        values: one number for each rectangle of the record's granularity.
        record: gives the granularity and the shape.
        columns: divides K, and divides the rectangle's width where that is less than K.
    """
    height, width = record.key.granularity.extents(record.shape)
    rows, features = record.shape
    tall = values.repeat_interleave(height, 0)[:rows]
    return tall.repeat_interleave(max(1, width // columns), 1)[:, : features // columns].contiguous()


def row_scales(record: QuantizedTensor) -> Tensor:
    """One float32 scale for each row, [N], of a record that has one scale for each row or for several rows."""
    return spread(effective_scale(record), record, record.shape[-1]).reshape(-1)


def exact_in(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every one of the values survives being stored in the dtype."""
    return torch.equal(values.to(dtype).to(values.dtype), values)


def integers_in_range(plain: QuantizedTensor) -> Tensor:
    """The integers that the codes of a plain record stand for, before zero points and scales, int32 [N, K].

    Raises:
        CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
    """
    element = plain.key.element
    numbers = plain["codes"].int() - element.bias
    low, high = (int(extreme) for extreme in torch.aminmax(numbers))
    if low < element.min or high > element.max:
        raise CheckpointError(
            f"Weights from {low} to {high} are stored as {element}, which ends at {element.min:.0f} and "
            f"{element.max:.0f}.",
            "Get the file again.",
        )
    return numbers


def int8_codes(plain: QuantizedTensor) -> Tensor:
    """The numbers that the codes of a plain record stand for, before scaling, int8 [N, K]; they must fit.

    Codes that are int8 already are not copied.
    """
    element = plain.key.element
    if code_dtype(element) is torch.int8:
        return plain["codes"].contiguous()
    return decode(plain["codes"], element).to(torch.int8)
