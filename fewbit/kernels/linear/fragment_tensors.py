"""Weight fragments (`fragment_layout`) of a plain record, and the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.kernels.linear.fragment_layout import (
    CODE_BYTES,
    DEPTH,
    DTYPES,
    FLOAT_GROUPS,
    INTEGER,
    MAGIC,
    OFFSET,
    ROWS,
    FragmentLayout,
)
from fewbit.kernels.linear.fragment_words import CODES, codes_of, words_of
from fewbit.kernels.linear.operands import integers_in_range, spread
from fewbit.kernels.linear.recoded_scales import FOLDED_TOP, absorbed, e5m3_bits, e5m3_numbers, folded, used_groups
from fewbit.numerics import QuantizedTensor, decode, effective_scale
from fewbit.spec.element import E2M1, E4M3, E8M0

SCALED_EXPONENT = 7
"""NVFP4 is decoded times 2**-7, for which scales have their exponents from SCALED_BASE on."""
SCALED_BASE = 13 << 3
LARGEST_E8M0 = 127 + 126
"""Where the largest E8M0 scale stands: decoding takes 2**126 away from its number."""
_STEPS = (4, 2, 4, 2), (2, 2, 4, 4)
"""How a thread's 64 input features fall apart: words, runs of 8, columns of threads, pairs; for `e4m3` steps of 32,
runs of 16, columns of threads, fours."""
_ORDER = (8, 6, 9, 7), (8, 6, 7, 9)
"""The same as axes behind unit, warp, thread's row, row of two, depth and half, in the order of bytes."""


def fragment_tensors(plain: QuantizedTensor, layout: FragmentLayout) -> dict[str, Tensor]:
    """The prepared weight of a plain record.

    Returns:
        `weight` uint8 [units, depths, unit_bytes], and `row_scale` float32 [units * 64] where the layout has it.

    Raises:
        CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
    """
    if layout.element != INTEGER:
        codes, scales, row_scale = _floats(plain, layout)
        missing = layout.units * ROWS - layout.rows
        padded = torch.nn.functional.pad(row_scale.expand(layout.rows), (0, missing)).contiguous()
        stored = _stored(scales, layout) if layout.folds else _pairs(scales, layout)
        return {"weight": torch.cat([_codes(codes, layout), stored], -1), "row_scale": padded}
    dtype = DTYPES[layout.dtype]
    numbers = integers_in_range(plain)
    codes = numbers + layout.offset
    if layout.decoding.is_fp8:
        codes = torch.where(numbers < 0, OFFSET - 1 - numbers, numbers)  # a sign over the magnitude, less one if set
    parts = [_codes(codes, layout), _pairs(_over_groups(effective_scale(plain), plain, layout).to(dtype), layout)]
    if layout.has_zero:
        parts.append(_pairs(_over_groups(_zeros(plain, layout), plain, layout).to(dtype), layout))
    return {"weight": torch.cat(parts, -1).contiguous()}


def _floats(plain: QuantizedTensor, layout: FragmentLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] of E2M1, scales [N, K / group] as they are stored, and what multiplies rows, [1] or [N]."""
    codes, row_scale = plain["codes"].view(torch.uint8).int(), torch.ones(1, device=plain["codes"].device)
    if "global_scale" in plain:
        row_scale = plain["global_scale"].float().reshape(-1)
    if plain.key.scale.element == E4M3:
        scale = plain["scale"].float()
        return absorbed(codes, scale, layout.group), e5m3_bits(scale) + SCALED_BASE, row_scale * 2.0**SCALED_EXPONENT
    if not layout.decoding.is_fp8:
        exponents = torch.where(used_groups(plain), plain["scale"].view(torch.uint8).int(), 0)
        largest = int(exponents.max())
        return codes, (exponents - largest + LARGEST_E8M0).clamp(min=0), row_scale * 2.0 ** (largest - 127)
    if layout.folds:
        binades, largest_of_rows = folded(plain)
        return codes, 8 * binades, row_scale * largest_of_rows * 2.0**-FOLDED_TOP
    return codes, decode(plain["scale"], E8M0).to(DTYPES[layout.dtype]), row_scale * 2.0**-FOLDED_TOP


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
    is_fp8 = layout.decoding.is_fp8
    missing = (0, layout.depths * DEPTH - layout.columns, 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(codes, missing)
    axes = padded.view(layout.units, 4, 8, 2, layout.depths, 2, *_STEPS[is_fp8])
    nibbles = axes.permute(0, 4, 5, 1, 2, *_ORDER[is_fp8], 3).reshape(-1, CODES)
    words = words_of(nibbles, layout.element, layout.operand)
    return words.view(torch.uint8).view(layout.units, layout.depths, CODE_BYTES)


def _pairs(values: Tensor, layout: FragmentLayout) -> Tensor:
    """16-bit values [N, groups] -> uint8 [units, depths, scale_bytes]."""
    groups = DEPTH // layout.group
    missing = (0, layout.depths * groups - values.shape[1], 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(values, missing).view(layout.units, ROWS, layout.depths, groups)
    return padded.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(layout.units, layout.depths, -1)


def _stored(bits: Tensor, layout: FragmentLayout) -> Tensor:
    """Scales of a byte [N, groups] -> uint8 [units, depths, scale_bytes]: two groups of two rows in a word."""
    groups = DEPTH // layout.group
    missing = (0, layout.depths * groups - bits.shape[1], 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(bits, missing).to(torch.uint8)
    axes = padded.view(layout.units, ROWS // 2, 2, layout.depths, groups // 2, 2)
    return axes.permute(0, 3, 4, 1, 2, 5).reshape(layout.units, layout.depths, -1)


def fragment_numbers(weight: Tensor, layout: FragmentLayout, row_scale: Tensor | None = None) -> Tensor:
    """The numbers that a prepared weight stands for, float32 [N, K], rounded as the device rounds them, if it does."""
    codes, scales, zeros = torch.split(
        weight, [CODE_BYTES, layout.scale_bytes, layout.unit_bytes - CODE_BYTES - layout.scale_bytes], -1
    )
    stored, is_fp8 = _unpacked(codes, layout), layout.decoding.is_fp8
    if row_scale is not None:
        numbers = decode(stored.to(torch.uint8), E2M1) * _float_scales(scales, layout)
        return numbers.to(DTYPES[layout.dtype]).float() * row_scale[: layout.rows, None]
    stored = stored.float()
    if is_fp8:
        return torch.where(stored < OFFSET, stored, OFFSET - 1 - stored) * _unpaired(scales, layout)
    dtype = DTYPES[layout.dtype]
    zero: Tensor | int = layout.offset
    if layout.has_zero:
        zero = _unpaired(zeros, layout) - MAGIC[layout.dtype]
    return ((stored - zero) * _unpaired(scales, layout)).to(dtype).float()


def _unpacked(codes: Tensor, layout: FragmentLayout) -> Tensor:
    """The inverse of `_codes`, [N, K]."""
    is_fp8 = layout.decoding.is_fp8
    nibbles = codes_of(codes.contiguous().view(torch.int32), layout.element, layout.operand)
    parts = [_STEPS[is_fp8][axis - 6] for axis in _ORDER[is_fp8]]
    axes = nibbles.view(layout.units, layout.depths, 2, 4, 8, *parts, 2)
    back = [5 + _ORDER[is_fp8].index(axis) for axis in (6, 7, 8, 9)]
    rows = axes.permute(0, 3, 4, 9, 1, 2, *back).reshape(layout.units * ROWS, -1)
    return rows[: layout.rows, : layout.columns]


def _float_scales(scales: Tensor, layout: FragmentLayout) -> Tensor:
    """What multiplies E2M1's numbers before `row_scale` does, float32 [N, K]."""
    if not layout.folds:
        return _unpaired(scales, layout) * 2.0**FOLDED_TOP
    axes = scales.reshape(layout.units, layout.depths, DEPTH // layout.group // 2, ROWS // 2, 2, 2)
    bits = axes.permute(0, 3, 4, 1, 2, 5).reshape(layout.units * ROWS, -1).int()
    if not layout.decoding.is_fp8 and layout.group == FLOAT_GROUPS[E4M3]:
        numbers = e5m3_numbers(bits - SCALED_BASE) * 2.0**-SCALED_EXPONENT
    else:
        exponents = FOLDED_TOP - bits // 8 if layout.decoding.is_fp8 else bits - LARGEST_E8M0
        numbers = torch.ldexp(torch.ones_like(bits, dtype=torch.float32), exponents)
    return numbers.repeat_interleave(layout.group, 1)[: layout.rows, : layout.columns]


def _unpaired(pairs: Tensor, layout: FragmentLayout) -> Tensor:
    """uint8 [units, depths, scale_bytes] -> float32 [N, K]."""
    groups = DEPTH // layout.group
    values = pairs.contiguous().view(DTYPES[layout.dtype]).view(layout.units, layout.depths, groups, ROWS)
    wide = values.permute(0, 3, 1, 2).reshape(layout.units * ROWS, -1).float().repeat_interleave(layout.group, 1)
    return wide[: layout.rows, : layout.columns]
