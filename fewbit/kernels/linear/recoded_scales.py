"""Scales of floating-point weights as bits that a decoder multiplies in, and codes that absorb what these bits lack."""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.numerics import QuantizedTensor, decode
from fewbit.spec.element import E8M0

SMALLEST = 2.0**-9
"""Of E4M3's numbers above zero."""
FOLDED_GROUP = 32
FOLDED_RANGE = 11
"""E2M1 times a power of two from 1 down to 2**-11 is a normal number of E4M3 with room for six above."""
FOLDED_TOP = 6
"""The exponent of a row's largest scale in its codes: six times it is below E4M3's largest number."""


def e5m3_bits(scale: Tensor) -> Tensor:
    """E4M3 numbers -> int32 of five exponent bits, zero meaning 2**-9, over three mantissa bits; zero becomes 2**-9."""
    mantissa, exponent = torch.frexp(torch.where(scale == 0, SMALLEST, scale.abs()))
    return ((exponent + 8) << 3) + ((mantissa * 2 - 1) * 8).int()


def e5m3_numbers(bits: Tensor) -> Tensor:
    """The inverse of `e5m3_bits`, float32."""
    return torch.ldexp(1 + (bits & 7) / 8, (bits >> 3) - 9)


def absorbed(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """Codes of 4-bit floats [N, K] with the signs of negative scales [N, K / group] and the zeros of scales of zero."""
    wide = scale.repeat_interleave(group, 1)
    return torch.where(wide == 0, 0, codes ^ ((wide < 0).int() << 3))


def can_fold(plain: QuantizedTensor) -> bool:
    """Whether the scales of rows of a plain record of E2M1 are near enough to each other for E4M3 to hold them."""
    scale, largest = _scales(plain)
    return bool((scale * 2.0**FOLDED_RANGE >= largest)[used_groups(plain)].all())


def folded(plain: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Binades from each scale up to its row's largest, int32 [N, K / 32], FOLDED_RANGE at most; the largest, [N].

    Groups of zeros aside, which count as none.
    """
    scale, largest = _scales(plain)
    relative = torch.where(scale > largest, 1.0, scale / largest)
    return (-torch.log2(relative)).round().clamp(max=FOLDED_RANGE).int(), largest.flatten()


def _scales(plain: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Scales [N, K / 32], and the largest of each row, [N, 1], groups of zeros aside."""
    scale = decode(plain["scale"], plain.key.scale.element)
    largest = torch.where(used_groups(plain), scale, 0.0).amax(1, keepdim=True).clamp(min=E8M0.smallest_positive)
    return scale, largest


def used_groups(plain: QuantizedTensor) -> Tensor:
    """Whether groups hold anything but zeros, [N, K / 32]."""
    return (plain["codes"] & 7).ne(0).view(plain.shape[0], -1, FOLDED_GROUP).any(-1)
