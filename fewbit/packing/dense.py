"""Dense n-bit words: codes of a run end to end in a little-endian bit string cut into words.

Code i of a run along `layout.axis` occupies bits [i * bits, (i + 1) * bits) of the string; word 0 holds the first
`word_bits` bits, lowest first, and a code may straddle two words. The last word of a run is padded with zero bits.

This one layout is GPTQ's (int32 along K of a transposed weight), AutoRound's, compressed-tensors' pack-quantized (int32
along K, codes plus 2**(bits-1)) and its zero points (along N), Humming's, the FP4 pairs of NVFP4 and MXFP4 (uint8, low
nibble first) and MXFP6's four codes in three bytes. Sources: formats.md sections 0, 3 and 11; compressed-tensors
0.20.1.
"""

from __future__ import annotations

from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.numerics.cast import code_dtype
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

_WORD_DTYPES = {8: torch.uint8, 32: torch.int32}


class Dense(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "dense"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout.word_bits not in _WORD_DTYPES or not 1 <= layout.bits <= 8:
            raise ShapeError(
                f"There are no dense words of {layout.word_bits} bits that hold codes of {layout.bits} bits.",
                f"Use 1 to 8 bits in words of {' or '.join(map(str, _WORD_DTYPES))}.",
            )
        words = -(-_along(shape, layout) * layout.bits // layout.word_bits)
        return (*shape[:-1], words) if layout.axis == "K" else (*shape[:-2], words, shape[-1])

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        fields = (codes.view(torch.uint8) if codes.dtype.is_floating_point else codes).to(torch.int64)
        fields = _axis_last(fields + layout.offset, layout) & ((1 << layout.bits) - 1)
        count, width = fields.shape[-1], layout.word_bits
        period = width // gcd(layout.bits, width)  # codes after which a code starts a word again
        fields = torch.nn.functional.pad(fields, (0, -count % period)).unflatten(-1, (-1, period))
        words = fields.new_zeros(*fields.shape[:-1], period * layout.bits // width)
        for position in range(period):
            word, shift = divmod(position * layout.bits, width)
            words[..., word] |= fields[..., position] << shift
            if shift + layout.bits > width:
                words[..., word + 1] |= fields[..., position] >> (width - shift)
        words = words.flatten(-2)[..., : -(-count * layout.bits // width)] & ((1 << width) - 1)
        return _axis_back(_narrow(words, width), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        count, width = _along(shape, layout), layout.word_bits
        raw = _axis_last(words, layout).to(torch.int64) & ((1 << width) - 1)
        period = width // gcd(layout.bits, width)
        per_period = period * layout.bits // width
        raw = torch.nn.functional.pad(raw, (0, -raw.shape[-1] % per_period)).unflatten(-1, (-1, per_period))
        fields = raw.new_empty(*raw.shape[:-1], period)
        for position in range(period):
            word, shift = divmod(position * layout.bits, width)
            field = raw[..., word] >> shift
            if shift + layout.bits > width:
                field = field | (raw[..., word + 1] << (width - shift))
            fields[..., position] = field
        dtype = code_dtype(element)
        # A field is the code plus the offset modulo 2**bits; the code is the one of that remainder in the element's
        # range, which starts at zero or, in two's complement, at minus half.
        half = 1 << (layout.bits - 1) if dtype is torch.int8 else 0
        fields = fields.flatten(-2)[..., :count] - layout.offset + half
        codes = _axis_back((fields & ((1 << layout.bits) - 1)) - half, layout)
        return codes.to(torch.uint8).view(dtype) if dtype.is_floating_point else codes.to(dtype)


def _along(shape: tuple[int, ...], layout: Layout) -> int:
    return shape[-1] if layout.axis == "K" else shape[-2]


def _axis_last(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor if layout.axis == "K" else tensor.transpose(-1, -2)


def _axis_back(tensor: Tensor, layout: Layout) -> Tensor:
    return tensor.contiguous() if layout.axis == "K" else tensor.transpose(-1, -2).contiguous()


def _narrow(words: Tensor, width: int) -> Tensor:
    """int64 words of `width` unsigned bits in the stored dtype, bit for bit."""
    dtype = _WORD_DTYPES[width]
    if width == 8:
        return words.to(dtype)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(dtype)
