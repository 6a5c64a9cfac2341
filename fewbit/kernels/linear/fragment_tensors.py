"""Weight fragments (`fragment_layout`) of a plain record, and the numbers that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.kernels.linear.fragment_layout import (
    DEPTH,
    DTYPES,
    FLOAT_GROUPS,
    INT8,
    MAGIC,
    OFFSET,
    ROWS,
    FragmentLayout,
)
from fewbit.kernels.linear.fragment_words import CODES, codes_of, words_of
from fewbit.kernels.linear.operands import integers_in_range, row_scales, spread
from fewbit.kernels.linear.recoded_scales import FOLDED_TOP, absorbed, e5m3_bits, e5m3_numbers, folded, used_groups
from fewbit.numerics import QuantizedTensor, decode, effective_scale
from fewbit.spec.element import E2M1, E4M3, E8M0, ELEMENTS

SCALED_EXPONENT = 7
"""NVFP4 is decoded times 2**-7, for which scales have their exponents from SCALED_BASE on."""
SCALED_BASE = 13 << 3
LARGEST_E8M0 = 127 + 126
"""Where the largest E8M0 scale stands: decoding takes 2**126 away from its number."""
_STEPS = {"words": (2, 4, 2, 4, 2), "e4m3": (2, 2, 2, 4, 4), "bytes": (4, 2, 2, 4, 2)}
"""How the 128 input features of a unit fall apart (16 bytes, products, runs of a product, columns of threads,
neighbours) by what codes are stored in: words for 16-bit operands or for `e4m3`, or bytes."""
_ORDER = {"words": (8, 6, 9, 7), "e4m3": (8, 6, 7, 9), "bytes": (8, 6, 7, 9)}
"""The last four as axes behind unit, warp, thread's row, row of two, depth and 16 bytes, in the order of bytes."""


def fragment_tensors(plain: QuantizedTensor, layout: FragmentLayout) -> dict[str, Tensor]:
    """The prepared weight of a plain record.

    Returns:
        `weight` uint8 [units, depths, unit_bytes], and `row_scale` float32 [units * 64] where the layout has it.

    Raises:
        CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
    """
    if layout.element == E2M1.name:
        codes, scales, row_scale = _floats(plain, layout)
        stored = _stored(scales, layout) if layout.folds else _pairs(scales, layout)
        return {"weight": torch.cat([_codes(codes, layout), stored], -1), "row_scale": _padded(row_scale, layout)}
    if not layout.group:
        codes = plain["codes"].view(torch.uint8).int() if layout.element == E4M3.name else integers_in_range(plain)
        return {"weight": _codes(codes, layout), "row_scale": _padded(row_scales(plain), layout)}
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


def _padded(row_scale: Tensor, layout: FragmentLayout) -> Tensor:
    """float32 [1] or [N] -> [units * 64]."""
    return torch.nn.functional.pad(row_scale.expand(layout.rows), (0, layout.units * ROWS - layout.rows)).contiguous()


def _kind(layout: FragmentLayout) -> str:
    if layout.decoding.code_bits == 8:
        return "bytes"
    return "e4m3" if layout.decoding.is_fp8 else "words"


def _codes(codes: Tensor, layout: FragmentLayout) -> Tensor:
    """int32 codes [N, K] -> uint8 [units, depths, code_bytes]."""
    kind = _kind(layout)
    missing = (0, layout.depths * DEPTH - layout.columns, 0, layout.units * ROWS - layout.rows)
    padded = torch.nn.functional.pad(codes, missing)
    axes = padded.view(layout.units, 4, 8, 2, layout.depths, *_STEPS[kind])
    ordered = axes.permute(0, 4, 5, 1, 2, *_ORDER[kind], 3).reshape(-1, CODES)
    words = ordered.to(torch.uint8) if kind == "bytes" else words_of(ordered, layout.element, layout.operand)
    return words.view(torch.uint8).view(layout.units, layout.depths, layout.code_bytes)


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
    sizes = [layout.code_bytes, layout.scale_bytes, layout.unit_bytes - layout.code_bytes - layout.scale_bytes]
    codes, scales, zeros = torch.split(weight, sizes, -1)
    stored, dtype = _unpacked(codes, layout), DTYPES[layout.dtype]
    if row_scale is not None:
        is_integer = layout.element == INT8
        numbers = stored.float() if is_integer else decode(stored.to(torch.uint8), ELEMENTS[layout.element])
        if layout.group:
            numbers = (numbers * _float_scales(scales, layout)).to(dtype).float()
        return numbers * row_scale[: layout.rows, None]
    numbers = stored.float()
    if layout.decoding.is_fp8:
        return torch.where(stored < OFFSET, numbers, OFFSET - 1 - numbers) * _unpaired(scales, layout)
    zero: Tensor | int = layout.offset
    if layout.has_zero:
        zero = _unpaired(zeros, layout) - MAGIC[layout.dtype]
    return ((numbers - zero) * _unpaired(scales, layout)).to(dtype).float()


def _unpacked(codes: Tensor, layout: FragmentLayout) -> Tensor:
    """The inverse of `_codes`, int32 [N, K]."""
    kind = _kind(layout)
    steps, order = _STEPS[kind], _ORDER[kind]
    if kind == "bytes":
        ordered = codes.contiguous().view(torch.int8).int()
    else:
        ordered = codes_of(codes.contiguous().view(torch.int32), layout.element, layout.operand)
    axes = ordered.view(layout.units, layout.depths, steps[0], 4, 8, *(steps[axis - 5] for axis in order), 2)
    back = [5 + order.index(axis) for axis in (6, 7, 8, 9)]
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


def group_scales(weight: Tensor, layout: FragmentLayout) -> Tensor:
    """The scales of a prepared weight whose scales have two bytes, [K / group, rounded up, N]."""
    pairs = weight[..., layout.code_bytes : layout.code_bytes + layout.scale_bytes].contiguous()
    values = pairs.view(DTYPES[layout.dtype]).view(layout.units, -1, ROWS)
    return values.transpose(0, 1).reshape(-1, layout.units * ROWS)[:, : layout.rows]


def _unpaired(pairs: Tensor, layout: FragmentLayout) -> Tensor:
    """uint8 [units, depths, scale_bytes] -> float32 [N, K]."""
    groups = DEPTH // layout.group
    values = pairs.contiguous().view(DTYPES[layout.dtype]).view(layout.units, layout.depths, groups, ROWS)
    wide = values.permute(0, 3, 1, 2).reshape(layout.units * ROWS, -1).float().repeat_interleave(layout.group, 1)
    return wide[: layout.rows, : layout.columns]
