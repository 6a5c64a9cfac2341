"""What packings are made of: codes as unsigned fields, fields in words, and words in the layout's orientation.

Inside a packing the packed axis is the last one and everything is int64; only the ends are in stored dtypes.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from fewbit.lazy import functional as F
from fewbit.lazy import torch
from fewbit.numerics.cast import code_dtype
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = (8, 16, 32)
"""Widths of words."""


def word_dtype(width: int) -> torch.dtype:
    """The dtype in which words of a width are stored."""
    return {8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]


def extent_along(shape: tuple[int, ...], layout: Layout) -> int:
    """How many codes lie along the packed axis of codes of `shape` [..., N, K]."""
    return shape[-1] if layout.axis == "K" else shape[-2]


def shape_with(words: int, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Stored shape of codes of `shape` [..., N, K] when `words` words hold what lies along the packed axis."""
    other = shape[-2] if layout.axis == "K" else shape[-1]
    return (*shape[:-2], other, words) if _words_are_last(layout) else (*shape[:-2], words, other)


def fields_of(codes: Tensor, layout: Layout) -> Tensor:
    """Codes [..., N, K] plus the layout's offset, modulo 2**bits, the packed axis last."""
    numbers = (codes.view(torch.uint8) if codes.dtype.is_floating_point else codes).to(torch.int64)
    numbers = numbers if layout.axis == "K" else numbers.transpose(-1, -2)
    return (numbers + layout.offset) & ((1 << layout.bits) - 1)


def codes_of(fields: Tensor, layout: Layout, element: Element) -> Tensor:
    """The inverse of `fields_of`.

    A field is the code plus the offset modulo 2**bits; the code is the one of that remainder in the element's range,
    which starts at zero or, in two's complement, at minus half.
    """
    dtype = code_dtype(element)
    half = 1 << (layout.bits - 1) if dtype is torch.int8 else 0
    codes = ((fields - layout.offset + half) & ((1 << layout.bits) - 1)) - half
    codes = (codes if layout.axis == "K" else codes.transpose(-1, -2)).contiguous()
    return codes.to(torch.uint8).view(dtype) if dtype.is_floating_point else codes.to(dtype)


def words_of(fields: Tensor, bits: int, width: int) -> Tensor:
    """Fields along the last axis, end to end in a little-endian bit string cut into unsigned words of `width` bits."""
    count = fields.shape[-1]
    period = width // gcd(bits, width)  # fields after which a field starts a word again
    fields = F.pad(fields, (0, -count % period)).unflatten(-1, (-1, period))
    words = fields.new_zeros(*fields.shape[:-1], period * bits // width)
    for position in range(period):
        word, shift = divmod(position * bits, width)
        words[..., word] |= fields[..., position] << shift
        if shift + bits > width:
            words[..., word + 1] |= fields[..., position] >> (width - shift)
    return words.flatten(-2)[..., : -(-count * bits // width)] & ((1 << width) - 1)


def fields_in(words: Tensor, bits: int, width: int, count: int) -> Tensor:
    """The inverse of `words_of`: the first `count` fields."""
    period = width // gcd(bits, width)
    per_period = period * bits // width
    words = F.pad(words, (0, -words.shape[-1] % per_period)).unflatten(-1, (-1, per_period))
    fields = words.new_empty(*words.shape[:-1], period)
    for position in range(period):
        word, shift = divmod(position * bits, width)
        field = words[..., word] >> shift
        if shift + bits > width:
            field = field | (words[..., word + 1] << (width - shift))
        fields[..., position] = field
    return fields.flatten(-2)[..., :count] & ((1 << bits) - 1)


def narrowed(words: Tensor, width: int) -> Tensor:
    """Unsigned int64 words of `width` bits in the stored dtype, bit for bit."""
    if width > 8:  # the dtype is signed
        words = torch.where(words >> (width - 1) > 0, words - (1 << width), words)
    return words.to(word_dtype(width))


def stored(words: Tensor, layout: Layout) -> Tensor:
    """Unsigned words along the last axis as the layout stores them: dtype, and orientation."""
    words = narrowed(words, layout.word_bits)
    return (words if _words_are_last(layout) else words.transpose(-1, -2)).contiguous()


def raw(words: Tensor, layout: Layout) -> Tensor:
    """The inverse of `stored`."""
    words = words if _words_are_last(layout) else words.transpose(-1, -2)
    return words.to(torch.int64) & ((1 << layout.word_bits) - 1)


def _words_are_last(layout: Layout) -> bool:
    return (layout.axis == "K") is not layout.transposed
