"""Weight fragments: the prepared layout of 4-bit weights whose tensor-core operand stays in registers.

A unit is 64 output features by 128 input features: codes, then scales, then zero points, in one run of bytes that the
copy engine moves at once; uint8 [N/64, K/128, bytes]. A thread of a warpgroup finds its share of 64 input features in
16 bytes, a word for each 16: in the fragment of `wgmma` a thread has two output features of its warp's 16 and four
input features twice, and since any order of output features will do, the two are neighbours, which the result is then
stored by. Nibbles i and i + 4 of a word are neighbouring input features, one in each half of a register once masked.

Both axes are padded with weights under scales of zero. Scales of groups longer than 128 features, and of rows, are
repeated for each 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.operands import integers_in_range, spread
from fewbit.kernels.linear.written_layout import WrittenLayout
from fewbit.numerics import QuantizedTensor, decode, effective_scale
from fewbit.spec.element import E4M3

ROWS, DEPTH = 64, 128
GROUPS = (128, 64, 32)  # input features under one scale, the fewest scales first
CODE_BYTES = ROWS * DEPTH // 2
MAGIC = {"bf16": 128, "f16": 1024}
"""What an integer in the low mantissa bits of a float counts from."""
OFFSET = 8  # of signed codes; without zero points the kernel takes it for granted
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Decoding:
    """What a kernel is compiled for: `group`, `has_zero`, `dtype` and `operand` of a `FragmentLayout`."""

    group: int
    has_zero: bool
    dtype: str
    operand: str


@dataclass(frozen=True)
class FragmentLayout(WrittenLayout):
    """Where the codes, scales and zero points of a weight [rows, columns] lie; see the head of this file.

    Attributes:
        group: input features under one stored scale.
        dtype: of scales and results, `bf16` or `f16`.
        offset: what is added to an integer before it is stored.
        has_zero: whether zero points are stored, as they are for unsigned codes even if they are all zero.
        operand: what tensor cores multiply: the dtype, or `e4m3`.
    """

    rows: int
    columns: int
    group: int
    dtype: str
    offset: int
    has_zero: bool
    operand: str

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.group, self.has_zero, self.dtype, self.operand)

    @property
    def operand_bytes(self) -> int:
        """Bytes of an input feature of x."""
        return 1 if self.operand == E4M3.name else 2

    @property
    def units(self) -> int:
        """Units of output features."""
        return -(-self.rows // ROWS)

    @property
    def depths(self) -> int:
        """Units of input features."""
        return -(-self.columns // DEPTH)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a unit, or of its zero points."""
        return 2 * ROWS * (DEPTH // self.group)

    @property
    def unit_bytes(self) -> int:
        return CODE_BYTES + self.scale_bytes * (1 + self.has_zero)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weight."""
        return self.units * self.depths * self.unit_bytes


_STEPS = (4, 2, 4, 2), (2, 2, 4, 4)
"""How a thread's 64 input features fall apart: words, runs of 8, columns of threads, pairs; for `e4m3` steps of 32,
runs of 16, columns of threads, fours."""
_ORDER = (8, 6, 9, 7), (8, 6, 7, 9)
"""The same as axes behind unit, warp, thread's row, row of two, depth and half, in the order of bytes."""


def fragment_layout_of(request: LinearRequest, operand: str | None = None) -> FragmentLayout | None:
    """The layout of a request's weight, or None where it has none.

    Args:
        operand: what tensor cores multiply, `e4m3`, or None for the request's dtype.
    """
    key, columns = request.key.weight, request.columns
    element = key.element
    if not element.is_integer or element.max - element.min > 15 or key.global_scale is not None:
        return None
    if request.dtype not in DTYPES or key.scale.element.name != request.dtype:
        return None
    width = min(key.granularity.extents((request.rows, columns))[1], columns)
    group = next((size for size in GROUPS if width >= columns or (width % size == 0 and columns % size == 0)), None)
    if group is None:
        return None
    signed = element.min < 0
    has_zero = not key.symmetric or not signed
    if operand is None:
        return FragmentLayout(
            request.rows, columns, group, request.dtype, OFFSET if signed else 0, has_zero, request.dtype
        )
    return None if has_zero else FragmentLayout(request.rows, columns, group, request.dtype, 0, False, operand)


def fragments(plain: QuantizedTensor, layout: FragmentLayout) -> Tensor:
    """The prepared weight, uint8 [units, depths, unit_bytes], of a plain record.

    Raises:
        CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
    """
    dtype = DTYPES[layout.dtype]
    numbers = integers_in_range(plain)
    codes = numbers + layout.offset
    if layout.operand == E4M3.name:
        codes = torch.where(numbers < 0, OFFSET - 1 - numbers, numbers)  # a sign over the magnitude, less one if set
    parts = [_codes(codes, layout), _pairs(_over_groups(effective_scale(plain), plain, layout).to(dtype), layout)]
    if layout.has_zero:
        parts.append(_pairs(_over_groups(_zeros(plain, layout), plain, layout).to(dtype), layout))
    return torch.cat(parts, -1).contiguous()


def _zeros(plain: QuantizedTensor, layout: FragmentLayout) -> Tensor:
    """Zero points in the unit of stored codes, counted from the same number as these, of the shape of scales."""
    base = float(layout.offset + MAGIC[layout.dtype])
    if "zero_point" not in plain:
        return torch.full_like(effective_scale(plain), base)
    return decode(plain["zero_point"], plain.key.element) + base


def _over_groups(values: Tensor, plain: QuantizedTensor, layout: FragmentLayout) -> Tensor:
    """[N, K / group], rounded up: one value for each stored scale."""
    width = plain.key.granularity.extents(plain.shape)[1]
    if width >= layout.columns:
        return spread(values, plain, layout.columns).expand(-1, -(-layout.columns // layout.group))
    return spread(values, plain, layout.group)


def _codes(codes: Tensor, layout: FragmentLayout) -> Tensor:
    """int32 codes [N, K] -> uint8 [units, depths, CODE_BYTES]."""
    missing = (0, layout.depths * DEPTH - layout.columns, 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(codes, missing)
    axes = padded.view(layout.units, 4, 8, 2, layout.depths, 2, *_STEPS[layout.operand == E4M3.name])
    nibbles = axes.permute(0, 4, 5, 1, 2, *_ORDER[layout.operand == E4M3.name], 3).reshape(-1, 4, 2)
    pairs = nibbles[..., 0] | nibbles[..., 1] << 4
    return pairs.to(torch.uint8).view(layout.units, layout.depths, CODE_BYTES)


def _pairs(values: Tensor, layout: FragmentLayout) -> Tensor:
    """16-bit values [N, groups] -> uint8 [units, depths, scale_bytes]."""
    groups = DEPTH // layout.group
    missing = (0, layout.depths * groups - values.shape[1], 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(values, missing).view(layout.units, ROWS, layout.depths, groups)
    return padded.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(layout.units, layout.depths, -1)


def fragment_numbers(weight: Tensor, layout: FragmentLayout) -> Tensor:
    """The numbers that a prepared weight stands for, float32 [N, K], rounded as the device rounds them, if it does."""
    codes, scales, zeros = weight.split(
        [CODE_BYTES, layout.scale_bytes, layout.unit_bytes - CODE_BYTES - layout.scale_bytes], -1
    )
    nibbles = torch.stack([codes & 15, codes >> 4], -1)
    is_fp8 = layout.operand == E4M3.name
    parts = [_STEPS[is_fp8][axis - 6] for axis in _ORDER[is_fp8]]
    axes = nibbles.view(layout.units, layout.depths, 2, 4, 8, *parts, 2)
    back = [5 + _ORDER[is_fp8].index(axis) for axis in (6, 7, 8, 9)]
    stored = axes.permute(0, 3, 4, 9, 1, 2, *back).reshape(layout.units * ROWS, -1)[: layout.rows, : layout.columns]
    stored = stored.float()
    if is_fp8:
        return torch.where(stored < OFFSET, stored, OFFSET - 1 - stored) * _unpaired(scales, layout)
    dtype = DTYPES[layout.dtype]
    zero: Tensor | int = layout.offset
    if layout.has_zero:
        zero = _unpaired(zeros, layout) - MAGIC[layout.dtype]
    return ((stored - zero) * _unpaired(scales, layout)).to(dtype).float()


def _unpaired(pairs: Tensor, layout: FragmentLayout) -> Tensor:
    """uint8 [units, depths, scale_bytes] -> float32 [N, K]."""
    groups = DEPTH // layout.group
    values = pairs.contiguous().view(DTYPES[layout.dtype]).view(layout.units, layout.depths, groups, ROWS)
    wide = values.permute(0, 3, 1, 2).reshape(layout.units * ROWS, -1).float().repeat_interleave(layout.group, 1)
    return wide[: layout.rows, : layout.columns]
