"""How a scale follows from the largest magnitude, rule by rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.numerics import clipped_share, decode, effective_scale, quantize
from fewbit.spec import ELEMENTS, Element, LinearKey, QuantKey, Recipe, Rule, ScaleRules, Scheme
from tests.golden import floats

MX_ELEMENTS = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]


def _mx_scale(largest: Tensor, element: str, rule: str) -> Tensor:
    """The E8M0 bytes that `quantize` stores for blocks whose largest magnitudes are `largest`."""
    blocks = torch.zeros(len(largest), 32)
    blocks[:, 5] = -largest
    blocks[:, 7] = largest / 2
    return quantize(blocks, QuantKey.parse(f"{element}:group32:e8m0"), ScaleRules(mx=rule))["scale"].flatten()


def _many_magnitudes() -> Tensor:
    by_magnitude = torch.exp2(torch.empty(2000).uniform_(-90, 90))
    edges = torch.tensor([1.5, 1.75, 1.875, 1.9375, 6.0, 7.5, 28.0, 448.0, 57344.0, 1.0])
    edges = torch.cat(
        [edges, torch.nextafter(edges, torch.zeros(())), torch.nextafter(edges, torch.full((), torch.inf))]
    )
    return torch.cat([by_magnitude, edges, edges * 2**20, edges * 2.0**-40])


@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_floor_is_the_exponent_less_the_elements_largest(element: str) -> None:
    largest = _many_magnitudes()
    exponents = [math.frexp(a)[1] - 1 for a in largest.tolist()]
    top = math.floor(math.log2(ELEMENTS[element].max))
    assert _mx_scale(largest, element, "floor").tolist() == [127 + exponent - top for exponent in exponents]


@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_even_goes_up_where_the_magnitude_rounds_to_the_next_power_of_two(element: str) -> None:
    largest = _many_magnitudes()
    threshold = 2 - 2.0 ** -(ELEMENTS[element].mantissa_bits + 1)
    expected = _mx_scale(largest, element, "floor").int() + (2 * torch.frexp(largest).mantissa >= threshold)
    assert torch.equal(_mx_scale(largest, element, "even").int(), expected.int())


@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_ceil_is_the_smallest_scale_that_never_saturates(element: str) -> None:
    largest, top = _many_magnitudes().double(), ELEMENTS[element].max
    scale = torch.exp2(_mx_scale(largest.float(), element, "ceil").double() - 127)
    assert bool((largest <= top * scale).all())
    assert bool((largest > top * scale / 2).all())


@pytest.mark.parametrize(
    ("largest", "floor", "even", "ceil"),
    # Examples of OCP's element E2M1: 1.75 rounds up to 2, 7 to 8, and 7 is more than 6 times the scale of 6.
    [(1.0, 125, 125, 125), (1.75, 125, 126, 126), (5.0, 127, 127, 127), (6.0, 127, 127, 127), (7.0, 127, 128, 128)],
)
def test_examples_of_fp4(largest: float, floor: int, even: int, ceil: int) -> None:
    found = [_mx_scale(torch.tensor([largest]), "e2m1", rule).item() for rule in ("floor", "even", "ceil")]
    assert found == [floor, even, ceil]


@pytest.mark.parametrize("exponent", [-20, 0, 9])
@pytest.mark.parametrize(
    ("rule", "steps", "clipped"),
    [("floor", (0, 0, 0, 0), (0, 0, 0, 1)), ("even", (0, 0, 1, 1), (0, 0, 0, 0)), ("ceil", (0, 0, 1, 1), (0, 0, 0, 0))],
)
def test_the_three_rules_by_their_bytes_b45(
    rule: str, steps: tuple[int, ...], clipped: tuple[int, ...], exponent: int
) -> None:
    """B45: block maxima of 5, 6, 7 and 7.5; the rule is a recorded option, and what it clips is counted."""
    blocks = torch.zeros(4, 32)
    blocks[:, 3] = torch.tensor([5.0, 6.0, 7.0, 7.5]) * 2.0**exponent
    record = quantize(blocks, QuantKey.parse("e2m1:group32:e8m0"), ScaleRules(mx=rule))
    assert record["scale"].flatten().tolist() == [127 + exponent + step for step in steps]
    assert clipped_share(blocks, record) * blocks.numel() == sum(clipped)
    recipe = Recipe(
        Scheme("X", (Rule(("Linear",), LinearKey.parse("e2m1:group32:e8m0")),)), "x", scale_rules=ScaleRules(mx=rule)
    )
    assert Recipe.from_json(recipe.to_json()).scale_rules.mx == rule


@pytest.mark.parametrize("text", ["int4:group32:bf16", "int3:asym:group32:f16", "e4m3:channel:f32", "int8:tensor:f32"])
def test_scales_from_extremes_clip_nothing_and_static_ones_do(text: str) -> None:
    key, numbers = QuantKey.parse(text), torch.randn(8, 64)
    record = quantize(numbers, key)
    assert clipped_share(numbers, record) == 0
    assert clipped_share(numbers * 3, record) > 0


@pytest.mark.parametrize(("field", "element"), [("e8m0_mxfp4", "e2m1"), ("e8m0_mxfp6_e2m3", "e2m3")])
def test_golden_compressed_tensors_rule(field: str, element: str, golden: dict[str, Any]) -> None:
    vector = golden["ct_mx_scale_rule"]
    assert _mx_scale(floats(vector["amax"]), element, "even").tolist() == vector[field]


def test_compressed_tensors_rounds_mxfp8_magnitudes_like_fp4(golden: dict[str, Any]) -> None:
    # A documented difference: it rounds to one mantissa bit there, `even` to E4M3's three, as Quark does.
    vector = golden["ct_mx_scale_rule"]
    largest, theirs = floats(vector["amax"]), torch.tensor(vector["e8m0_mxfp8"])
    fraction = 2 * torch.frexp(largest).mantissa
    expected = theirs - ((fraction >= 1.75) & (fraction < 1.9375)).int()
    assert torch.equal(_mx_scale(largest, "e4m3", "even").int(), expected.int())
    assert not torch.equal(expected, theirs)


@pytest.mark.parametrize(
    ("field", "element"),
    [("fp4", "e2m1"), ("fp6_e2m3", "e2m3"), ("fp6_e3m2", "e3m2"), ("fp8_e4m3", "e4m3"), ("fp8_e5m2", "e5m2")],
)
def test_golden_quark_rule(field: str, element: str, golden: dict[str, Any]) -> None:
    vector = golden["quark_mx_even_round"]
    largest, expected = floats(vector["amax"]), torch.tensor(vector["e8m0"][field])
    some = largest > 0  # any scale will do for a block of zeros; Quark's is 2**-126, ours 1
    assert torch.equal(_mx_scale(largest[some], element, "even").int(), expected[some].int())


@pytest.mark.parametrize("rule", ["floor", "even", "ceil"])
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_mx_scales_at_the_ends_of_float32(element: str, rule: str) -> None:
    largest = torch.tensor([0.0, 1e-45, 2.0**-127, 2.0**-126, 3.0e38, torch.finfo(torch.float32).max])
    scale = torch.exp2(_mx_scale(largest, element, rule).double() - 127)
    assert bool(scale.isfinite().all())
    # The scale of a huge block is huge: nothing wraps around on its way through infinity.
    assert bool((scale[4:] * ELEMENTS[element].max >= largest[4:].double() * 0.7).all())
    assert bool((scale[2:4] <= 2.0**-125).all())


@pytest.mark.parametrize("element", ["int4", "uint4b8", "int8", "int3", "int2"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integer_scale_rules(element: str, sign: int) -> None:
    key, known = QuantKey.parse(f"{element}:channel:f32"), ELEMENTS[element]
    numbers = sign * torch.tensor([[3.0, -1.0, 0.5]])
    full = quantize(numbers, key, ScaleRules(integer="full"))
    restricted = quantize(numbers, key, ScaleRules(integer="restricted"))
    assert full["scale"].item() == pytest.approx(3 / ((2**known.bits - 1) / 2))
    assert restricted["scale"].item() == pytest.approx(3 / (2 ** (known.bits - 1) - 1))
    assert decode(full["codes"], known)[0, 0] == (known.max if sign > 0 else known.min)  # the lowest code is reached
    assert decode(restricted["codes"], known)[0, 0] == sign * known.max  # the grid is symmetric


def test_an_unsigned_element_without_zero_points_uses_its_whole_range() -> None:
    record = quantize(torch.tensor([[0.0, 1.0, 3.0]]), QuantKey.parse("uint4:channel:f32"))
    assert record["codes"].tolist() == [[0, 5, 15]]


@pytest.mark.parametrize("element", [e for e in ELEMENTS.values() if e.is_integer], ids=str)
def test_asymmetric_scales_span_all_codes(element: Element) -> None:
    numbers = torch.linspace(-1, 3, 4 * (1 << element.bits))[None]
    record = quantize(numbers, QuantKey.parse(f"{element}:asym:tensor:f32"))
    assert record["scale"].item() == pytest.approx(4 / (2**element.bits - 1))
    codes = decode(record["codes"], element)
    assert (codes.min(), codes.max()) == (element.min, element.max)
    assert decode(record["zero_point"], element).item() == round(element.min + 1 / record["scale"].item())


@pytest.mark.parametrize("numbers", [[1.0, 2.0, 3.0], [-3.0, -2.0, -1.0], [5.0, 5.0, 5.0]])
def test_asymmetric_ranges_include_zero(numbers: list[float]) -> None:
    record = quantize(torch.tensor([numbers]), QuantKey.parse("int4:asym:channel:f32"))
    zero = decode(record["zero_point"], ELEMENTS["int4"]).item()
    assert zero == (-8 if numbers[0] > 0 else 7)
    assert record["scale"].item() == pytest.approx(max(map(abs, numbers)) / 15)


@pytest.mark.parametrize("scale_element", ["f16", "bf16", "f32"])
def test_zero_points_follow_from_the_stored_scale(scale_element: str) -> None:
    numbers = torch.rand(500, 16) - torch.rand(500, 1)
    record = quantize(numbers, QuantKey.parse(f"uint8:asym:channel:{scale_element}"))
    low = numbers.amin(-1, keepdim=True).clamp(max=0)
    assert torch.equal(record["zero_point"].float(), torch.round(-low / record["scale"].float()).clamp(0, 255))


@pytest.mark.parametrize("scale_element", ["e4m3", "e8m0", "f16", "bf16", "f32"])
@pytest.mark.parametrize("text", ["int4:channel", "int4:asym:channel", "e2m1:group2"])
def test_the_scale_of_zeros_is_one(text: str, scale_element: str) -> None:
    assert bool((effective_scale(quantize(torch.zeros(2, 4), QuantKey.parse(f"{text}:{scale_element}"))) == 1).all())


@pytest.mark.parametrize("scale_element", ["e4m3", "e8m0", "f16", "bf16", "f32"])
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-38, 1e-20, 1e-9, 1.0, 1e9, 1e38])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_stored_scale_is_finite_and_not_zero(scale_element: str, magnitude: float, symmetric: bool) -> None:
    asymmetric = "" if symmetric else "asym:"
    numbers = torch.tensor([[magnitude, -magnitude / 3, 0.0]])
    record = quantize(numbers, QuantKey.parse(f"int4:{asymmetric}channel:{scale_element}"))
    scale = effective_scale(record)
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())


@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 1e38, 3.4e38])
def test_nvfp4_scales_are_finite_and_not_zero_on_both_levels(magnitude: float) -> None:
    numbers = torch.zeros(2, 32)
    numbers[0, 3] = magnitude
    record = quantize(numbers, QuantKey.parse("e2m1:group16:e4m3/tensor:f32"))
    for scale in (record["global_scale"], decode(record["scale"], ELEMENTS["e4m3"]), effective_scale(record)):
        assert bool(scale.isfinite().all())
        assert bool((scale > 0).all())


def test_nvfp4_brings_the_largest_block_scale_to_the_top_of_e4m3() -> None:
    numbers = torch.randn(64, 256)
    record = quantize(numbers, QuantKey.parse("e2m1:group16:e4m3/tensor:f32"))
    assert decode(record["scale"], ELEMENTS["e4m3"]).max() == 448
    assert record["global_scale"].item() == pytest.approx(numbers.abs().max().item() / 2688)
    divisor = 1 / record["global_scale"]
    assert divisor.item() == divisor.float().item()  # formats that store the divisor in float32 lose nothing


def test_effective_scale_is_the_correctly_rounded_quotient() -> None:
    # Formats that store a divisor mean scale / divisor in float32; the hub's multiplier must give the same bits.
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None].expand(500, -1)
    divisors = torch.exp2(torch.empty(500, 1, 1).uniform_(-20, 20))
    key = QuantKey.parse("e2m1:group16:e4m3/tensor:f32")
    record = quantize(torch.zeros(500, 1, 126 * 16), key, global_scale=1.0 / divisors.double())
    record = record.with_tensors(scale=scales[:, None])
    assert torch.equal(effective_scale(record), scales[:, None].float() / divisors)
