"""Casting numbers to element formats and back: the definition every kernel is tested against.

`encode` rounds to nearest, ties to even, and saturates: it clamps before any cast, because casts to narrow floats do
not saturate everywhere. `decode` is exact in float32.

Codes are held in the dtype torch has for the element: int8 for signed integers, uint8 for unsigned and biased ones and
for elements that torch has no dtype for (E2M1, E2M3, E3M2), the float8 dtypes for FP8, and the floats themselves.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fewbit.lazy import torch
from fewbit.spec.element import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Element, Specials

if TYPE_CHECKING:
    from torch import Tensor

_HELD_AS = {
    E4M3.name: "float8_e4m3fn",
    E5M2.name: "float8_e5m2",
    E4M3FNUZ.name: "float8_e4m3fnuz",
    E5M2FNUZ.name: "float8_e5m2fnuz",
    E8M0.name: "uint8",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
}


def code_dtype_name(element: Element) -> str:
    """torch's name, without the package, of the dtype in which unpacked codes of `element` are held."""
    if element.is_integer:
        return "int8" if element.signed and not element.bias else "uint8"
    return _HELD_AS.get(element.name, "uint8")


def code_dtype(element: Element) -> torch.dtype:
    """The dtype in which unpacked codes of `element` are held."""
    held: torch.dtype = getattr(torch, code_dtype_name(element))
    return held


def float_element(dtype: torch.dtype) -> Element:
    """The element whose codes torch holds in the float `dtype`: float16, bfloat16, float32 or a float8."""
    names = {held: name for name, held in _HELD_AS.items() if held != "uint8"}
    return Element.parse(names[str(dtype).removeprefix("torch.")])


def encode(numbers: Tensor, element: Element) -> Tensor:
    """Codes of `numbers`, rounded to nearest with ties to even and saturated.

    Infinities saturate to the largest finite number. NaN stays NaN where the element has one and becomes zero where it
    has none; callers that must not lose a NaN check before. E8M0 holds powers of two only, so "even" means nothing
    there: a number halfway between two of them goes to the larger.

    Args:
        numbers: any float dtype and shape.
        element: the format to round to.

    Returns:
        A tensor of the same shape in `code_dtype(element)`.
    """
    numbers = numbers.float()
    if element.is_integer:
        rounded = torch.round(torch.nan_to_num(numbers, nan=0.0)).clamp_(element.min, element.max)
        return rounded.add_(element.bias).to(code_dtype(element))
    if element.is_exponent_only:
        return _encode_exponent(numbers, element)
    clamped = numbers.clamp(element.min, element.max)
    if element.name in _HELD_AS:
        return clamped.to(code_dtype(element))
    return _encode_small_float(torch.nan_to_num(clamped, nan=0.0), element)


def decode(codes: Tensor, element: Element) -> Tensor:
    """The numbers that `codes` stand for, in float32.

    Args:
        codes: in `code_dtype(element)`, or uint8 bytes of an FP8 element.
        element: their format.
    """
    if element.is_integer:
        return codes.float() - element.bias if element.bias else codes.float()
    if codes.dtype is torch.uint8 or codes.dtype is torch.float8_e8m0fnu:
        return _table(element, codes.device)[codes.view(torch.uint8).int()]
    return codes.float()


def round_to(numbers: Tensor, element: Element) -> Tensor:
    """`numbers` rounded to the nearest number of `element`, in float32."""
    return decode(encode(numbers, element), element)


def nearest(numbers: Tensor, element: Element) -> Tensor:
    """The same as `round_to` for finite numbers, without a code in between: the inner step of algorithms.

    Args:
        numbers: float32, finite; overwritten.
        element: an integer without bias, or a float.
    """
    if element.is_integer:
        return numbers.round_().clamp_(element.min, element.max)
    numbers.clamp_(element.min, element.max)
    exponent = torch.frexp(numbers).exponent.sub_(1).clamp_(min=element.min_exponent).sub_(element.mantissa_bits)
    step = torch.ldexp(torch.ones_like(numbers), exponent)
    return numbers.div_(step).round_().mul_(step)


def _encode_small_float(numbers: Tensor, element: Element) -> Tensor:
    """Bits of a float element that torch has no dtype for; `numbers` are clamped and not NaN."""
    magnitude = numbers.abs()
    exponent = _floor_log2(magnitude).clamp_(min=element.min_exponent)
    # Steps of the binade's spacing: a subnormal has fewer than 2**mantissa_bits, a normal from there up to twice that.
    # Adding the binade's number times 2**mantissa_bits gives the code, and a carry into the next binade falls in place.
    steps = torch.round(torch.ldexp(magnitude, element.mantissa_bits - exponent))
    code = steps.int() + ((exponent - element.min_exponent) << element.mantissa_bits)
    sign = torch.signbit(numbers).to(torch.uint8) << (element.bits - 1)
    return code.to(torch.uint8) | sign


def _encode_exponent(numbers: Tensor, element: Element) -> Tensor:
    """E8M0 code of the power of two nearest to each number, 1.5 times one going up as torch's own cast does."""
    clamped = numbers.clamp(element.min, element.max)
    exponent = _floor_log2(clamped)
    above = clamped >= torch.ldexp(torch.full_like(clamped, 1.5), exponent)
    code = (exponent + above + element.bias).clamp_(0, (1 << element.bits) - 2)
    nan = torch.full_like(code, (1 << element.bits) - 1)
    return torch.where(numbers.isnan(), nan, code).to(torch.uint8)


def _floor_log2(magnitude: Tensor) -> Tensor:
    """floor(log2(x)) as int32, exact for every float32 including subnormals; a large negative number for zero."""
    exponent = torch.frexp(magnitude).exponent - 1
    return torch.where(magnitude > 0, exponent, torch.full_like(exponent, -(1 << 10)))


@cache
def _table(element: Element, device: torch.device) -> Tensor:
    return torch.tensor(element.values, dtype=torch.float32, device=device)


def finite_codes(element: Element) -> Tensor:
    """Every code of an element of at most 8 bits that is a finite number, in `code_dtype(element)`."""
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    finite = torch.tensor(element.values).isfinite()
    kept = codes[finite]
    if element.is_integer and element.specials is Specials.NONE and code_dtype(element) is torch.int8:
        return torch.tensor(element.values, dtype=torch.int8)[finite]
    dtype = code_dtype(element)
    return kept.view(dtype) if dtype.is_floating_point else kept
