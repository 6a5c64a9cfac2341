"""What formats share: the shapes of scales on disk, and whether a layer's tensors are what specs say."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fewbit.checkpoints.dtypes import accepts, header_of
from fewbit.checkpoints.interface import TensorHeader
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor, code_dtype_name
from fewbit.spec.element import Element
from fewbit.spec.granularity import Granularity
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import ONE, ROWS, Extent, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def scale_extents(granularity: Granularity) -> tuple[Extent, ...]:
    """Shape of a weight's scales as most formats store them: [1], [N, 1], [N, K/g] or [N/r, K/c], rounded up."""
    if granularity.kind == "tensor":
        return (ONE,)
    rows = ROWS if granularity.rows == 1 else Extent("N", 1, granularity.rows)
    return (rows, Extent("K", 1, granularity.columns) if granularity.columns else ONE)


def element_dtype(element: Element) -> str:
    """torch's name of the dtype that holds codes of `element`, as `TensorSpec.dtype` wants it."""
    return code_dtype_name(element)


def misfit(
    specs: Sequence[TensorSpec], headers: Mapping[str, TensorHeader], shape: tuple[int, ...] | None = None
) -> str | None:
    """Why a layer's tensors are not those of `specs`, or None where they are.

    Axes of length one do not count outside the codes: files write one number as [], [1] or [1, 1].

    Args:
        specs: what the tensors should be.
        headers: by name below the module's; names that no spec has are ignored.
        shape: the layer's [..., N, K]; without it any [N, K] that suits all tensors will do.
    """
    missing = [spec.name for spec in specs if not spec.optional and spec.name not in headers]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    present = [spec for spec in specs if spec.name in headers]
    *lead, rows, columns = shape or largest_shape(present, headers)
    for spec in present:
        found, needed = headers[spec.name], (*lead, *spec.shape_of(rows, columns))
        if not accepts(spec.dtype, found.dtype):
            return f"{spec.name} is {found.dtype}, needed {spec.dtype or 'a float'}"
        exact = spec.role == "codes"
        if spec.shape is not None and (found.shape if exact else _squeezed(found.shape)) != (
            needed if exact else _squeezed(needed)
        ):
            return f"{spec.name} has shape {list(found.shape)}, needed {list(needed)}"
    return None


def largest_shape(specs: Sequence[TensorSpec], headers: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """The largest [N, K] whose tensors could have the shapes in `headers`; 0 for an axis that no tensor has.

    A stored axis of length ceil(extent * factor / divisor) leaves an interval of extents, and if any extent lies in the
    intervals of all tensors, the smallest upper end does. It is exact as soon as one tensor has the axis itself.
    """
    bounds: dict[str, int] = {}
    for spec in specs:
        shape = headers[spec.name].shape
        if spec.shape is None or len(shape) != len(spec.shape):
            continue
        for extent, size in zip(spec.shape, shape, strict=True):
            if extent.axis:
                upper = size * extent.divisor // extent.factor
                bounds[extent.axis] = min(bounds.get(extent.axis, sys.maxsize), upper)
    return bounds.get("N", 0), bounds.get("K", 0)


def tensors_by_role(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """A layer's tensors by role, in the shapes of their specs; bytes of E8M0 as uint8.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype than its spec says.
    """
    reason = misfit(specs, {name: header_of(tensor) for name, tensor in tensors.items()}, shape)
    if reason:
        raise CheckpointError(
            f"In a layer of shape {list(shape)}, {reason}.", "The file is damaged, or the configuration is not its own."
        )
    found = {}
    for spec in specs:
        if spec.name in tensors:
            tensor = tensors[spec.name]
            if spec.shape is not None:
                tensor = tensor.reshape((*shape[:-2], *spec.shape_of(shape[-2], shape[-1])))
            found[spec.role] = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e8m0fnu else tensor
    return found


def require_finite(name: str, scales: Tensor) -> None:
    """Raises CheckpointError where decoded scales hold NaN or infinity."""
    bad = ~scales.isfinite()
    if bad.any():
        raise CheckpointError(
            f"{name} holds {int(bad.sum())} of {bad.numel()} scales that are not finite.",
            "The file is damaged, or its writer divided by zero; quantize again.",
        )


def global_multiplier(name: str, stored: Tensor) -> Tensor:
    """float64 of a second-level scale that is stored as a multiplier.

    Raises:
        CheckpointError: it is zero, negative or not finite.
    """
    if not (stored.isfinite().all() and (stored > 0).all()):
        raise CheckpointError(
            f"{name} is {stored.flatten().tolist()}, needed a positive multiplier.",
            "The file is damaged, or calibration never reached the layer; quantize again.",
        )
    return stored.double()


def require_integer_zero_points(format_name: str, record: QuantizedTensor, key: LinearKey) -> None:
    """Raises OutputError for zero points between two codes, under a key that does not say so.

    Zero points of unsigned elements may be floats (HQQ, Humming); those of signed ones are codes.
    """
    zero_point = record.tensors.get("zero_point")
    if isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point() and key.weight.element.signed:
        raise OutputError(
            f"{format_name} stores the zero points of {key} as integers, found {zero_point.dtype}.",
            "Quantize again, or choose a format with float zero points (hqq, humming).",
        )


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
