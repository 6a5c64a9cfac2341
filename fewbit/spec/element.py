"""Element formats as values: what one stored code can mean.

An element says which numbers exist; where its bits lie is a `Layout`. Ranges and tables are computed from the fields,
so a new width is one value and nothing can disagree with it.

Sources: OCP Microscaling Formats (MX) 1.0 for E2M1, E2M3, E3M2 and E8M0; OCP 8-bit Floating Point 1.0 for E4M3 and
E5M2; the FNUZ variants as AMD CDNA3 has them (bias one higher, no negative zero, its code being the only NaN).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fewbit.errors import SchemeError, closest


class Specials(StrEnum):
    """Which codes of a float element are no finite numbers."""

    NONE = "none"  # every code is a number (E2M1, E2M3, E3M2)
    NAN = "nan"  # the code of all ones is NaN, no infinity (E4M3, E8M0)
    IEEE = "ieee"  # the largest exponent holds infinity and NaN (E5M2, f16, bf16, f32)
    FNUZ = "fnuz"  # the code of negative zero is NaN, no infinity


@dataclass(frozen=True)
class Element:
    """A number format.

    Attributes:
        name: canonical name, which `Element.parse` reads back.
        bits: bits per code.
        signed: whether negative numbers exist.
        exponent_bits, mantissa_bits: of a float; both 0 for an integer.
        bias: a float's exponent bias; for an integer the amount that is subtracted from the stored code.
        specials: which codes of a float are no finite numbers.
    """

    name: str
    bits: int
    signed: bool
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    specials: Specials = Specials.NONE

    def __str__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def is_exponent_only(self) -> bool:
        """Powers of two and nothing else (E8M0): a scale, never a weight."""
        return self.exponent_bits > 0 and self.mantissa_bits == 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number of a float."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number of a float (OCP's `emax`)."""
        top = (1 << self.exponent_bits) - 1
        if self.specials is Specials.IEEE:
            top -= 1
        if self.is_exponent_only:  # all ones is NaN and there is no mantissa to keep the binade alive
            top -= 1
        return top - self.bias

    @cached_property
    def max(self) -> float:
        """Largest finite number."""
        if self.is_integer:
            top = (1 << (self.bits - 1)) - 1 if self.signed and not self.bias else (1 << self.bits) - 1
            return float(top - self.bias)
        if self.is_exponent_only:
            return 2.0**self.max_exponent
        steps = (1 << self.mantissa_bits) - 1
        if self.specials is Specials.NAN:
            steps -= 1  # the last mantissa of the last binade is NaN
        return 2.0**self.max_exponent * (1 + steps / (1 << self.mantissa_bits))

    @cached_property
    def min(self) -> float:
        """Smallest finite number: the most negative one where the element is signed."""
        if self.is_integer:
            if self.bias:
                return float(-self.bias)
            return float(-(1 << (self.bits - 1))) if self.signed else 0.0
        if self.is_exponent_only:
            return 2.0**-self.bias
        return -self.max

    @property
    def smallest_positive(self) -> float:
        """Smallest number above zero (a subnormal where the element has them)."""
        if self.is_integer:
            return 1.0
        if self.is_exponent_only:
            return 2.0**-self.bias
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The number each code stands for, `2**bits` of them in code order; NaN and infinity included.

        Raises:
            SchemeError: the element is wider than 8 bits and has no table worth making.
        """
        if self.bits > 8:
            raise SchemeError(f"{self.name} has 2**{self.bits} codes, too many for a table of values.")
        return tuple(self._value(code) for code in range(1 << self.bits))

    def _value(self, code: int) -> float:
        if self.is_integer:
            if self.bias or not self.signed:
                return float(code - self.bias)
            return float(code - (1 << self.bits) if code >> (self.bits - 1) else code)
        all_ones = (1 << (self.bits - self.signed)) - 1
        magnitude = code & all_ones
        negative = self.signed and code != magnitude
        if self.is_exponent_only:
            return float("nan") if code == all_ones else 2.0 ** (code - self.bias)
        if self.specials is Specials.FNUZ and negative and magnitude == 0:
            return float("nan")
        if self.specials is Specials.NAN and magnitude == all_ones:
            return float("nan")
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if self.specials is Specials.IEEE and exponent == (1 << self.exponent_bits) - 1:
            value = float("nan") if mantissa else float("inf")
        elif exponent == 0:
            value = mantissa * self.smallest_positive
        else:
            value = 2.0 ** (exponent - self.bias) * (1 + mantissa / (1 << self.mantissa_bits))
        return -value if negative else value

    @classmethod
    def parse(cls, text: str) -> Element:
        """The element of that name; case is ignored.

        Raises:
            SchemeError: no element has that name.
        """
        found = ELEMENTS.get(text.strip().lower())
        if found is None:
            raise SchemeError(f"Unknown element format {text!r}.", closest(text, ELEMENTS))
        return found


def _float(name: str, exponent_bits: int, mantissa_bits: int, specials: Specials, extra_bias: int = 0) -> Element:
    bias = (1 << (exponent_bits - 1)) - 1 + extra_bias
    return Element(name, 1 + exponent_bits + mantissa_bits, True, exponent_bits, mantissa_bits, bias, specials)


E2M1 = _float("e2m1", 2, 1, Specials.NONE)
E2M3 = _float("e2m3", 2, 3, Specials.NONE)
E3M2 = _float("e3m2", 3, 2, Specials.NONE)
E4M3 = _float("e4m3", 4, 3, Specials.NAN)
E5M2 = _float("e5m2", 5, 2, Specials.IEEE)
E4M3FNUZ = _float("e4m3fnuz", 4, 3, Specials.FNUZ, extra_bias=1)
E5M2FNUZ = _float("e5m2fnuz", 5, 2, Specials.FNUZ, extra_bias=1)
E8M0 = Element("e8m0", 8, False, 8, 0, 127, Specials.NAN)
F16 = _float("f16", 5, 10, Specials.IEEE)
BF16 = _float("bf16", 8, 7, Specials.IEEE)
F32 = _float("f32", 8, 23, Specials.IEEE)

# int4: two's complement. uint4: plain. uint4b8: stored plain, 8 is subtracted.
_INTEGERS = [
    element
    for bits in range(2, 9)
    for element in (
        Element(f"int{bits}", bits, True),
        Element(f"uint{bits}", bits, False),
        Element(f"uint{bits}b{1 << (bits - 1)}", bits, True, bias=1 << (bits - 1)),
    )
]
_BINARY = Element("uint1", 1, False)  # HQQ's 1-bit codes; a signed bit would not hold a weight

ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in [_BINARY, *_INTEGERS, E2M1, E2M3, E3M2, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, F16, BF16, F32]
}


def integer(bits: int) -> Element:
    """The signed integer of that width, 2 to 8 bits.

    Raises:
        SchemeError: there is none of that width.
    """
    if not re.fullmatch(r"[2-8]", str(bits)):
        raise SchemeError(f"Integer weights of {bits} bits do not exist here.", "Use 2 to 8 bits.")
    return ELEMENTS[f"int{bits}"]
