"""Casts against the table of values, torch's own casts and the golden vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fewbit.numerics import code_dtype, decode, encode, finite_codes, float_element, round_to
from fewbit.spec import ELEMENTS, Element
from fewbit.spec.element import Specials
from tests.golden import floats
from tests.numerics.grid import BY_RULE, SMALL, distance_to_grid, grid

FP8 = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
WIDE = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
ROUNDING = [element for element in [*SMALL, *BY_RULE] if not element.is_exponent_only]


def _raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def _all_halves() -> torch.Tensor:
    """Every finite float16, in float32."""
    halves = torch.arange(1 << 16).to(torch.uint16).view(torch.float16).float()
    return halves[halves.isfinite()]


@pytest.mark.parametrize("element", [*SMALL, *BY_RULE], ids=str)
def test_every_finite_code_survives_decode_and_encode(element: Element) -> None:
    codes = finite_codes(element)
    assert len(codes) == sum(map(math.isfinite, element.values))
    assert codes.dtype == code_dtype(element)
    again = encode(decode(codes, element), element)
    assert again.dtype == codes.dtype
    assert torch.equal(_raw(again), _raw(codes))


@pytest.mark.parametrize("element", SMALL, ids=str)
def test_decode_gives_the_table(element: Element) -> None:
    table = torch.tensor(element.values)
    codes = finite_codes(element)
    index = codes.long() % (1 << element.bits) if element.is_integer else _raw(codes).long()
    assert torch.equal(decode(codes, element).view(torch.int32), table[index].view(torch.int32))


@pytest.mark.parametrize("name", FP8)
def test_fp8_bytes_decode_without_a_view(name: str) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    expected = raw.view(FP8[name]).float()
    torch.testing.assert_close(decode(raw, ELEMENTS[name]), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(decode(raw.view(FP8[name]), ELEMENTS[name]), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("element", ROUNDING, ids=str)
def test_a_tie_goes_to_the_even_code(element: Element) -> None:
    values = grid(element)
    middle = (values[1:] + values[:-1]) / 2
    codes = encode(middle.float(), element)
    chosen = decode(codes, element).double()
    assert torch.equal((chosen - middle).abs(), (values[1:] - values[:-1]) / 2)
    # Signed zero has two codes, both even, so parity is all there is to ask for.
    assert int((_raw(codes) & 1).sum()) == 0


@pytest.mark.parametrize("element", [*SMALL, *BY_RULE], ids=str)
def test_a_number_beside_a_tie_goes_to_the_nearer(element: Element) -> None:
    values = grid(element).float()
    middle = ((values[1:].double() + values[:-1].double()) / 2).float()
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    below = torch.nextafter(middle, torch.tensor(-torch.inf))
    assert torch.equal(round_to(above, element), values[1:])
    assert torch.equal(round_to(below, element), values[:-1])


@pytest.mark.parametrize("element", [*SMALL, *BY_RULE], ids=str)
def test_random_numbers_go_to_the_nearest(element: Element) -> None:
    generator = torch.Generator().manual_seed(1)
    evenly = (torch.rand(5_000, generator=generator) * 2 - 1) * 1.2 * element.max
    by_magnitude = torch.randn(5_000, generator=generator).sign() * torch.exp2(
        torch.empty(5_000).uniform_(-20, 20, generator=generator)
    )
    numbers = torch.cat([evenly, by_magnitude])
    numbers = numbers[numbers.isfinite()]
    clamped = numbers.clamp(element.min, element.max).double()
    found = round_to(numbers, element).double()
    assert torch.equal((found - clamped).abs(), distance_to_grid(clamped, element))
    assert bool(((found == 0) | (found.sign() == numbers.sign()) | (element.min >= 0)).all())


@pytest.mark.parametrize("element", [*SMALL, *BY_RULE, *(ELEMENTS[name] for name in ("f16", "bf16"))], ids=str)
@pytest.mark.parametrize("magnitude", [float("inf"), 3.4e38, 1e38, None])
def test_numbers_beyond_the_range_saturate(element: Element, magnitude: float | None) -> None:
    magnitude = 1.01 * element.max + 1 if magnitude is None else magnitude
    if magnitude <= element.max:
        pytest.skip(f"{element} holds {magnitude}.")
    found = round_to(torch.tensor([magnitude, -magnitude]), element)
    assert found.tolist() == [element.max, element.min]


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
def test_nan_stays_where_the_element_has_one_and_is_zero_elsewhere(element: Element) -> None:
    found = round_to(torch.tensor([float("nan"), 1.0]), element)
    assert found[1] == 1
    assert bool(found[0].isnan()) == (element.specials is not Specials.NONE)
    assert element.specials is not Specials.NONE or found[0] == 0


@pytest.mark.parametrize("element", BY_RULE, ids=str)
def test_the_rounding_rule_agrees_with_torch_on_every_half(element: Element) -> None:
    halves = _all_halves()
    halves = halves[(halves >= element.min) & (halves <= element.max)]
    assert torch.equal(encode(halves, element), halves.to(BY_RULE[element]).view(torch.uint8))


@pytest.mark.parametrize("name", FP8)
def test_fp8_agrees_with_torch_on_every_half_in_range(name: str) -> None:
    element, halves = ELEMENTS[name], _all_halves()
    halves = halves[(halves >= element.min) & (halves <= element.max)]
    assert torch.equal(_raw(encode(halves, element)), _raw(halves.to(FP8[name])))


def test_e8m0_agrees_with_torch_on_every_normal_binade() -> None:
    powers = torch.exp2(torch.arange(-126, 127, dtype=torch.float64))
    numbers = (powers[:, None] * torch.tensor([1.0, 1.25, 1.499, 1.5, 1.501, 1.75, 1.999]).double()).float()
    assert torch.equal(encode(numbers, ELEMENTS["e8m0"]), numbers.to(torch.float8_e8m0fnu).view(torch.uint8))


def test_e8m0_takes_zero_and_negative_numbers_to_its_smallest() -> None:
    assert encode(torch.tensor([0.0, -0.0, -3.0, 2.0**-127, 1e-45]), ELEMENTS["e8m0"]).tolist() == [0] * 5


@pytest.mark.parametrize("name", [name for name in FP8 if name.endswith("fnuz")])
def test_fnuz_never_makes_a_nan_of_a_negative_zero(name: str) -> None:
    codes = encode(torch.tensor([-0.0, -1e-30, -ELEMENTS[name].smallest_positive / 2]), ELEMENTS[name])
    assert _raw(codes).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"])
def test_negative_zero_keeps_its_sign(name: str) -> None:
    element = ELEMENTS[name]
    codes = encode(torch.tensor([-0.0, -element.smallest_positive / 4]), element)
    assert _raw(codes).tolist() == [1 << (element.bits - 1)] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("element", SMALL, ids=str)
def test_other_float_dtypes_give_the_same_codes(element: Element, dtype: torch.dtype) -> None:
    numbers = (torch.randn(4, 500) * 3).to(dtype)
    assert torch.equal(_raw(encode(numbers, element)), _raw(encode(numbers.float(), element)))


@pytest.mark.parametrize("element", SMALL, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_shape_and_input_are_kept(element: Element, shape: tuple[int, ...]) -> None:
    numbers = torch.randn(shape)
    before = numbers.clone()
    assert encode(numbers, element).shape == shape
    assert decode(encode(numbers, element), element).shape == shape
    assert torch.equal(numbers, before)


@pytest.mark.parametrize(("name", "dtype"), [*FP8.items(), *WIDE.items()])
def test_float_elements_and_dtypes_name_each_other(name: str, dtype: torch.dtype) -> None:
    assert float_element(dtype) is ELEMENTS[name]
    assert code_dtype(ELEMENTS[name]) is dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int4", torch.int8),
        ("uint4", torch.uint8),
        ("uint4b8", torch.uint8),
        ("e2m1", torch.uint8),
        ("e8m0", torch.uint8),
    ],
)
def test_dtype_of_codes_without_a_float_dtype(name: str, dtype: torch.dtype) -> None:
    assert code_dtype(ELEMENTS[name]) is dtype


def test_golden_fp8_cast_rounding(golden: dict[str, Any]) -> None:
    vector = golden["fp8_cast_rounding"]
    assert _raw(encode(floats(vector["x"]), ELEMENTS["e4m3"])).tolist() == vector["bytes_clamped"]


def test_golden_fp4_rounding(golden: dict[str, Any]) -> None:
    vector = golden["ct_fp4_round"]
    found = round_to(floats(vector["x"]), ELEMENTS["e2m1"])
    assert torch.equal(found.view(torch.int32), floats(vector["y"]).view(torch.int32))  # the sign of zero counts


def test_golden_same_bits_in_fnuz_are_half_the_number(golden: dict[str, Any]) -> None:
    vector = golden["e4m3fn_to_fnuz"]
    found = decode(torch.tensor(vector["bytes_fnuz"], dtype=torch.uint8), ELEMENTS["e4m3fnuz"])
    assert torch.equal(found, floats(vector["values_fnuz"]))
    assert torch.equal(found * vector["scale_multiplier"], floats(vector["values_fn"]).abs() * found.sign())
