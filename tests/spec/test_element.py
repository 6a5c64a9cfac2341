"""Elements against tables written by other projects, and against themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fewbit.errors import SchemeError
from fewbit.spec import ELEMENTS, Element, integer

SMALL = [element for element in ELEMENTS.values() if element.bits <= 8]
FLOATS = [element for element in ELEMENTS.values() if not element.is_integer]

TABLES = [
    ("e4m3", "table_float8_e4m3fn", "values_by_byte"),
    ("e5m2", "table_float8_e5m2", "values_by_byte"),
    ("e4m3fnuz", "table_float8_e4m3fnuz", "values_by_byte"),
    ("e5m2fnuz", "table_float8_e5m2fnuz", "values_by_byte"),
    ("e8m0", "table_float8_e8m0fnu", "values_by_byte"),
    ("e2m1", "table_fp4_e2m1", "values_by_nibble"),
    ("e2m3", "quark_fp6_e2m3", "table_0_63"),
    ("e3m2", "quark_fp6_e3m2", "table_0_63"),
]


@pytest.mark.parametrize(("name", "vector", "field"), TABLES)
def test_values_equal_the_golden_table(name: str, vector: str, field: str, golden: dict[str, Any]) -> None:
    expected = [float(value) for value in golden[vector][field]]
    values = ELEMENTS[name].values
    # repr tells -0.0 from 0.0 and makes NaN equal to itself
    assert [repr(value) for value in values] == [repr(value) for value in expected]


def test_every_small_float_has_a_golden_table() -> None:
    assert {name for name, _, _ in TABLES} == {element.name for element in SMALL if not element.is_integer}


@pytest.mark.parametrize("element", SMALL, ids=str)
def test_ranges_are_the_extremes_of_the_table(element: Element) -> None:
    finite = [value for value in element.values if math.isfinite(value)]
    assert len(element.values) == 1 << element.bits
    assert element.max == max(finite)
    assert element.min == min(finite)
    assert element.smallest_positive == min(value for value in finite if value > 0)
    assert element.signed == (element.min < 0)


@pytest.mark.parametrize("element", FLOATS, ids=str)
def test_exponents_agree_with_the_range(element: Element) -> None:
    assert element.max_exponent == math.floor(math.log2(element.max))
    if not element.is_exponent_only:
        assert element.smallest_positive == 2.0 ** (element.min_exponent - element.mantissa_bits)


@pytest.mark.parametrize(
    ("name", "largest", "smallest_positive"),
    [
        ("f16", 65504.0, 2.0**-24),
        ("bf16", 3.3895313892515355e38, 2.0**-133),
        ("f32", 3.4028234663852886e38, 2.0**-149),
        ("e4m3", 448.0, 2.0**-9),
        ("e5m2", 57344.0, 2.0**-16),
        ("e4m3fnuz", 240.0, 2.0**-10),
        ("e2m1", 6.0, 0.5),
        ("e2m3", 7.5, 0.125),
        ("e3m2", 28.0, 0.0625),
        ("e8m0", 2.0**127, 2.0**-127),
        ("int4", 7.0, 1.0),
        ("uint4", 15.0, 1.0),
        ("uint4b8", 7.0, 1.0),
    ],
)
def test_ranges_that_the_specifications_state(name: str, largest: float, smallest_positive: float) -> None:
    assert (ELEMENTS[name].max, ELEMENTS[name].smallest_positive) == (largest, smallest_positive)


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [("int4", 0b1000, -8), ("int4", 0b0111, 7), ("uint4", 0b1111, 15), ("uint4b8", 0, -8), ("uint8b128", 128, 0)],
)
def test_integer_codes(name: str, code: int, value: int) -> None:
    assert ELEMENTS[name].values[code] == value


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_text_form_parses_back(element: Element) -> None:
    assert Element.parse(str(element)) is element
    assert Element.parse(f" {element.name.upper()} ") is element


@pytest.mark.parametrize("element", [element for element in ELEMENTS.values() if element.bits > 8], ids=str)
def test_wide_elements_have_no_table(element: Element) -> None:
    with pytest.raises(SchemeError, match="too many"):
        _ = element.values


@pytest.mark.parametrize(("typo", "meant"), [("e4m33", "e4m3"), ("e2m11", "e2m1"), ("unit4", "uint4"), ("b16", "bf16")])
def test_a_typo_gets_the_closest_name(typo: str, meant: str) -> None:
    with pytest.raises(SchemeError, match=f"Did you mean '{meant}'"):
        Element.parse(typo)


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_gives_the_signed_width(bits: int) -> None:
    element = integer(bits)
    assert (element.bits, element.min, element.max) == (bits, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [-4, 0, 1, 9, 16, 44])
def test_other_widths_do_not_exist(bits: int) -> None:
    with pytest.raises(SchemeError, match=f"{bits} bits"):
        integer(bits)
