"""Scale rules: from the extremes of the numbers under one scale to the scale, in the element it is stored in.

A scale is always rounded to its stored element before any code is computed from it, is finite and is never zero: a
rectangle of zeros, or one whose scale would underflow, gets the smallest or a neutral scale and codes of zero.

Sources: formats.md section 11 of the house's references; OCP MX 1.0 section 6.3 for `floor`; NVFP4 as
compressed-tensors and ModelOpt write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbit.lazy import torch
from fewbit.numerics.cast import decode, encode
from fewbit.spec.element import Element
from fewbit.spec.key import QuantKey
from fewbit.spec.recipe import ScaleRules

if TYPE_CHECKING:
    from torch import Tensor

NVFP4_SCALE_TARGET = 448.0
"""The largest NVFP4 block scale of a tensor is brought to E4M3's largest number."""


def symmetric_scale(magnitude: Tensor, key: QuantKey, rules: ScaleRules, global_scale: Tensor | None) -> Tensor:
    """Stored scales for rectangles whose largest magnitudes are `magnitude`.

    Args:
        magnitude: float32 [..., R', C'].
        key: gives the element, the scale's element and whether there is a global scale.
        rules: see `ScaleRules`.
        global_scale: float64 multiplier that broadcasts to `magnitude`, for keys with a second level.

    Returns:
        Scales in the code dtype of the key's scale element, [..., R', C'].
    """
    element, stored = key.element, key.scale.element
    if stored.is_exponent_only:
        return _exponent_scale(magnitude, element, rules.mx)
    scale = divided(magnitude, _largest_code(element, rules))
    if global_scale is not None:
        # Multiplying by the reciprocal in float32 is what the producers do; a division would differ in the last bit.
        scale = scale * (1.0 / global_scale).float()
    return stored_scale(scale, stored)


def asymmetric_scale(low: Tensor, high: Tensor, key: QuantKey) -> tuple[Tensor, Tensor]:
    """Stored scales and integer zero points that map [low, high] (zero included) onto all codes of an integer.

    Returns:
        (scales, zero points): the zero point is the code of zero, in the dtype of the element's codes.
    """
    element = key.element
    scale = stored_scale(divided(high - low, element.max - element.min), key.scale.element)
    zero_point = torch.round(element.min - low / decode(scale, key.scale.element))
    return scale, encode(zero_point, element)


def global_scale_of(magnitude: Tensor, key: QuantKey) -> Tensor:
    """The second-level multiplier of a tensor whose largest magnitude is `magnitude`, as float64.

    It is the reciprocal of a float32 divisor, so that formats which store the divisor (compressed-tensors) and formats
    which store the multiplier in float32 (ModelOpt) both get it back: the first exactly, the second to its precision.
    """
    target = NVFP4_SCALE_TARGET * key.element.max
    divisor = torch.where(magnitude > 0, target / magnitude.float(), torch.ones_like(magnitude, dtype=torch.float32))
    largest = torch.finfo(torch.float32).max
    return 1.0 / divisor.clamp(max=largest).double()


def divided(numbers: Tensor, divisor: float) -> Tensor:
    """`numbers / divisor`, correctly rounded everywhere: GPUs multiply by the reciprocal of a Python number."""
    return numbers / torch.full_like(numbers, divisor)


def stored_scale(scale: Tensor, stored: Element) -> Tensor:
    """`scale` rounded to its stored element; zero becomes one, all else stays within the element's finite range."""
    bounded = scale.clamp(stored.smallest_positive, stored.max)
    return encode(torch.where(scale > 0, bounded, torch.ones_like(scale)), stored)


def _largest_code(element: Element, rules: ScaleRules) -> float:
    if element.is_integer and element.signed and rules.integer == "full":
        return (element.max - element.min) / 2
    return element.max


def _exponent_scale(magnitude: Tensor, element: Element, rule: str) -> Tensor:
    """E8M0 codes: 127 plus the exponent that `rule` gives; see `ScaleRules.mx`."""
    if rule == "ceil":
        fraction, exponent = torch.frexp(divided(magnitude, element.max))
        exponent = exponent - (fraction == 0.5).int()  # an exact power of two needs no rounding up
    elif rule == "even":
        exponent = _rounded_exponent(magnitude, element.mantissa_bits) - _exponent_of_max(element)
    else:
        exponent = torch.frexp(magnitude).exponent - 1 - _exponent_of_max(element)
    neutral = torch.full_like(exponent, 0)
    exponent = torch.where(magnitude > 0, exponent, neutral)
    return (exponent + 127).clamp_(0, 254).to(torch.uint8)


def _exponent_of_max(element: Element) -> int:
    return element.bits - 2 if element.is_integer else element.max_exponent


def _rounded_exponent(magnitude: Tensor, bits: int) -> Tensor:
    """floor(log2) of magnitudes whose mantissa is first rounded half up to `bits` bits.

    Integer arithmetic on the float's own bits: a carry out of the mantissa raises the exponent field, which is read
    back without making the number, since the one above the largest float would be infinite. Subnormals count as
    2**-127, which is as small as E8M0 gets.
    """
    raw = magnitude.contiguous().view(torch.int32)
    return ((raw + (1 << (22 - bits))) >> 23) - 127
