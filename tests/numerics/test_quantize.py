"""Quantize and dequantize by key: every number goes to the nearest point of its grid, and every edge case is legal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbit.numerics import QuantizedTensor, code_dtype, decode, dequantize, effective_scale, quantize, quantize_with
from fewbit.spec import ELEMENTS, PRESETS, QuantKey, ScaleRules
from tests.numerics.grid import distance_to_grid, spread, steps_of


def _preset_keys() -> list[str]:
    layers = [rule.key for scheme in PRESETS.values() for rule in scheme.rules]
    keys = [key for layer in layers for key in (layer.weight, layer.activation) if key is not None]
    return sorted({str(key) for key in keys})


def _element_keys() -> list[str]:
    weights = [element for element in ELEMENTS.values() if element.bits <= 8 and not element.is_exponent_only]
    symmetric = [f"{element}:group24:f32" for element in weights if element.signed]
    return symmetric + [f"{element}:asym:group24:f16" for element in weights if element.is_integer]


KEYS = [
    *_preset_keys(),
    *(
        "int4:group1:f32",
        "int4:asym:group7:bf16",
        "int4:block3x5:f16",
        "int4:asym:block3x5:f16",
        "int8:asym:tensor:f32",
    ),
    *("e2m3:group32:e8m0", "e3m2:group32:e8m0", "e5m2:group32:e8m0", "int8:group32:e8m0", "e4m3:tensor:f16"),
    *(
        "uint4:asym:group16:f16",
        "uint4b8:group16:f16",
        "e2m1:block4x16:e4m3/tensor:f32",
        "e2m1:group16:e4m3/channel:f32",
    ),
]
ALL_KEYS = [*KEYS, *_element_keys()]
SHAPES = [(5, 96), (3, 50), (1, 33), (7, 1)]


def _raw(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _assert_nearest(numbers: Tensor, record: QuantizedTensor) -> None:
    """Each code is that of the grid point nearest to its number, and dequantize says what the code stands for."""
    element, scale = record.key.element, effective_scale(record)
    steps = steps_of(numbers, record, scale)
    clamped = steps.clamp(element.min, element.max)
    found = decode(record["codes"], element).double()
    rounding = steps.abs() * 2.0**-22  # the quotient was rounded to float32 before it was rounded to the grid
    if element.is_integer and record.key.symmetric and record.key.scale.element.bits == 16:
        # The negative extreme of a rectangle is a tie that goes to the lowest code, however its scale was rounded.
        rounding = torch.where(found == element.min, rounding + 2 * steps.abs() * 2.0**-8, rounding)
    assert bool(((found - clamped).abs() <= distance_to_grid(clamped, element) + rounding).all())
    zero = spread(decode(record["zero_point"], element), record) if "zero_point" in record else 0.0
    expected = ((found - zero) * spread(scale, record)).float()
    assert torch.equal(dequantize(record), expected)


@pytest.mark.parametrize("text", ALL_KEYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_goes_to_the_nearest_point_of_its_grid(text: str, shape: tuple[int, int]) -> None:
    numbers = torch.randn(shape) * torch.exp2(torch.empty(shape[0], 1).uniform_(-6, 6))
    record = quantize(numbers, QuantKey.parse(text))
    record.validate()
    assert record.shape == shape
    assert record["codes"].dtype == code_dtype(record.key.element)
    _assert_nearest(numbers, record)


@pytest.mark.parametrize("text", ALL_KEYS)
def test_little_is_clipped(text: str) -> None:
    numbers = torch.randn(16, 96)
    record = quantize(numbers, QuantKey.parse(text))
    element = record.key.element
    steps = steps_of(numbers, record, effective_scale(record))
    beyond = torch.maximum(steps - element.max, element.min - steps).clamp(min=0)
    if record.key.scale.element.is_exponent_only:  # a power of two may fall short by the rounding of a magnitude
        assert beyond.max() < element.max / 2
    elif element.is_integer:  # half a step by design, and the rounding of the stored scale
        assert beyond.max() <= 0.5 + 2**element.bits * 2.0**-8
    else:  # the rounding of the stored scale: E4M3 keeps 3 bits of mantissa
        assert beyond.max() <= element.max * (2.0**-4 if record.key.scale.element.bits == 8 else 2.0**-8)


@pytest.mark.parametrize("text", ALL_KEYS)
def test_the_scale_fits_the_numbers(text: str) -> None:
    # Doubling every number doubles every scale that has the range, so no rectangle uses less than half its grid.
    numbers = torch.randn(16, 96)
    record = quantize(numbers, QuantKey.parse(text))
    element = record.key.element
    steps = steps_of(numbers, record, effective_scale(record))
    used = (steps.amax() - steps.amin()) / (element.max - element.min)
    assert used >= 0.45


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("shape", [(4, 96), (3, 50), (2, 3, 50)], ids=str)
def test_zeros_stay_zeros(text: str, shape: tuple[int, ...]) -> None:
    record = quantize(torch.zeros(shape), QuantKey.parse(text))
    assert bool((dequantize(record) == 0).all())
    scale = effective_scale(record)
    assert bool((scale.isfinite() & (scale > 0)).all())


@pytest.mark.parametrize("text", KEYS)
def test_a_row_of_zeros_among_numbers_stays_zero(text: str) -> None:
    """B38, B39: for every key, a rectangle of zeros is a finite scale and codes of zero."""
    numbers = torch.randn(12, 96)
    numbers[4] = 0
    numbers[:, 24:48] = 0
    back = dequantize(quantize(numbers, QuantKey.parse(text)))
    assert bool(back.isfinite().all())
    assert bool((back[numbers == 0] == 0).all())


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("magnitude", [1e38, -1e38, 1e4, 1e-30])
def test_one_number_among_zeros(text: str, magnitude: float) -> None:
    """B39."""
    key = QuantKey.parse(text)
    if key.element.min == 0 and magnitude < 0 and key.symmetric:
        pytest.skip("An unsigned element without zero points has no negative numbers.")
    numbers = torch.zeros(6, 64)
    numbers[2, 9] = magnitude
    back = dequantize(quantize(numbers, key))
    assert bool(back.isfinite().all())
    assert int((back != 0).sum()) <= 1
    limit = key.scale.element.max * (key.element.max - key.element.min)
    floor = key.scale.element.smallest_positive
    if floor < abs(magnitude) < limit / 2 or key.global_scale is not None:
        assert back[2, 9].item() == pytest.approx(magnitude, rel=0.34)  # 2 bits have a step of two thirds
    else:  # the stored scale has no such magnitude
        assert back[2, 9].item() * magnitude >= 0


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (0, 0), (3, 0, 64), (0, 4, 64), (2, 4, 0), (0, 50)], ids=str)
def test_empty_tensors(text: str, shape: tuple[int, ...]) -> None:
    key = QuantKey.parse(text)
    record = quantize(torch.zeros(shape), key)
    record.validate()
    assert record["scale"].shape == key.granularity.scale_shape(shape)
    assert dequantize(record).shape == shape
    assert bool(effective_scale(record).isfinite().all())


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("shape", [(3, 5, 50), (2, 2, 5, 33)], ids=str)
def test_a_stack_equals_its_slices(text: str, shape: tuple[int, ...]) -> None:
    key = QuantKey.parse(text)
    numbers = torch.randn(shape) * torch.exp2(torch.arange(shape[0])).reshape(-1, *[1] * (len(shape) - 1))
    stack = quantize(numbers, key)
    stack.validate()
    for index in range(shape[0]):
        piece = quantize(numbers[index], key)
        for role in piece.tensors:
            assert torch.equal(_raw(stack[role][index]), _raw(piece[role])), role


@pytest.mark.parametrize("block", ["block128x128", "tensor", "channel"])
def test_zeros_in_fp8_b39(block: str) -> None:
    """B39: all zeros, one row of zeros, and one number in 256x256."""
    key = QuantKey.parse(f"e4m3:{block}:f32")
    one = torch.zeros(256, 256)
    one[200, 7] = 3.0
    row = torch.randn(4, 8)
    row[2] = 0
    for numbers in (torch.zeros(4, 8), row, one):
        back = dequantize(quantize(numbers, key))
        assert bool(back.isfinite().all())
        assert bool((back[numbers == 0] == 0).all())
    assert back[200, 7] == 3.0


def test_a_block_of_zeros_beside_a_large_number_b38() -> None:
    """B38: the stand-in scale of a zero block stays inside E4M3, whose cast would not saturate."""
    numbers = torch.zeros(2, 32)
    numbers[0, 3] = 1e30
    record = quantize(numbers, QuantKey.parse("e2m1:group16:e4m3/tensor:f32"))
    scales = record["scale"].view(torch.uint8)
    assert not bool(((scales & 0x7F) == 0x7F).any())
    assert dequantize(record)[0, 3] == pytest.approx(1e30, rel=1e-6)
    assert int(dequantize(record).count_nonzero()) == 1


@pytest.mark.parametrize("text", KEYS[::3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (4, 49)])
def test_what_is_not_finite_is_refused(text: str, bad: float, place: tuple[int, int]) -> None:
    numbers = torch.randn(5, 50)
    numbers[place] = bad
    with pytest.raises(ValueError, match="finite"):
        quantize(numbers, QuantKey.parse(text))


@pytest.mark.parametrize("shape", [(), (4,)])
def test_fewer_than_two_axes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two axes"):
        quantize(torch.zeros(shape), QuantKey.parse("int4:tensor:f32"))


def test_negative_numbers_are_refused_where_they_would_be_lost() -> None:
    key = QuantKey.parse("uint4:channel:f32")
    positive = torch.rand(4, 32)
    _assert_nearest(positive, quantize(positive, key))
    with pytest.raises(ValueError, match="below zero"):
        quantize(torch.tensor([[1.0, -1.0]]), key)


@pytest.mark.parametrize("text", KEYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_input_dtypes(text: str, dtype: torch.dtype) -> None:
    numbers = torch.randn(4, 50).to(dtype)
    record, expected = (quantize(values, QuantKey.parse(text)) for values in (numbers, numbers.float()))
    assert all(torch.equal(_raw(record[role]), _raw(expected[role])) for role in expected.tensors)
    assert dequantize(record).dtype is torch.float32


@pytest.mark.parametrize("text", KEYS)
def test_views_and_inputs(text: str) -> None:
    numbers = torch.randn(50, 6)
    before = numbers.clone()
    record, expected = quantize(numbers.T, QuantKey.parse(text)), quantize(numbers.T.contiguous(), QuantKey.parse(text))
    assert torch.equal(_raw(record["codes"]), _raw(expected["codes"]))
    assert record["codes"].is_contiguous()
    assert torch.equal(numbers, before)


@pytest.mark.parametrize("text", KEYS)
def test_negative_zeros_and_subnormals(text: str) -> None:
    numbers = torch.full((4, 48), -0.0)
    assert bool((dequantize(quantize(numbers, QuantKey.parse(text))) == 0).all())
    numbers[:, ::3], numbers[:, 1::3] = 1e-40, -3e-39
    back = dequantize(quantize(numbers, QuantKey.parse(text)))
    assert bool(back.isfinite().all())
    assert (back - numbers).abs().max() <= 3e-39


@pytest.mark.parametrize("magnitude", [1e-9, 1e-7, 1e7, 1e30])
@pytest.mark.parametrize("text", ["int4:group16:f16", "int4:asym:group16:f16", "e2m1:channel:f16", "e4m3:tensor:f16"])
def test_magnitudes_beyond_a_float16_scale(text: str, magnitude: float) -> None:
    numbers = torch.randn(4, 48).clamp(-3, 3) * magnitude
    record = quantize(numbers, QuantKey.parse(text))
    assert bool(record["scale"].isfinite().all())
    assert bool((record["scale"] > 0).all())
    _assert_nearest(numbers, record)
    assert bool((dequantize(record) * numbers >= 0).all())


@pytest.mark.parametrize("rules", [ScaleRules(mx=rule) for rule in ("floor", "even", "ceil")], ids=str)
@pytest.mark.parametrize("element", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "int8"])
def test_every_mx_rule_rounds_to_the_nearest(element: str, rules: ScaleRules) -> None:
    numbers = torch.randn(8, 80)
    _assert_nearest(numbers, quantize(numbers, QuantKey.parse(f"{element}:group32:e8m0"), rules))


def test_fused_members_share_a_global_scale() -> None:
    key = QuantKey.parse("e2m1:group16:e4m3/tensor:f32")
    big, small = torch.randn(8, 64), torch.randn(8, 64) / 30
    shared = quantize(big, key)["global_scale"]
    record = quantize(small, key, global_scale=shared)
    assert torch.equal(record["global_scale"], shared)
    _assert_nearest(small, record)
    joined = quantize(torch.cat([big, small]), key, global_scale=shared)
    assert torch.equal(joined["codes"][8:], record["codes"])


# --- scales that are already known -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [text for text in KEYS if "/" not in text])
def test_quantize_with_the_scales_of_quantize_gives_its_codes(text: str) -> None:
    numbers = torch.randn(6, 50)
    record = quantize(numbers, QuantKey.parse(text))
    again = quantize_with(numbers, record.key, record["scale"], record.tensors.get("zero_point"))
    same = _raw(again["codes"]) == _raw(record["codes"])
    assert torch.equal(dequantize(again)[same], dequantize(record)[same])
    if record.key.element.is_integer and record.key.symmetric and record.key.scale.element.bits == 16:
        # Only `quantize` knows the extremes, whose ties it decides.
        same |= decode(record["codes"], record.key.element) == record.key.element.min
    assert bool(same.all())


def test_static_scales_saturate() -> None:
    """B41: numbers beyond 448, infinity too; a weight that holds infinity is refused instead (B41's report)."""
    key = QuantKey.parse("e4m3:tensor:f32")
    numbers = torch.tensor([[447.0, 449.0, 500.0, 1e4, -1e4, float("inf"), float("-inf")]])
    back = dequantize(quantize_with(numbers, key, torch.tensor(1.0)))
    assert back.tolist() == [[448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0]]


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.full((1, 1), 0.5)])
def test_one_static_scale_serves_every_shape(scale: Tensor) -> None:
    key = QuantKey.parse("int8:asym:tensor:f32")
    record = quantize_with(torch.tensor([[1.0, -2.0]]), key, scale, torch.tensor(3, dtype=torch.int8))
    record.validate()
    assert record["codes"].tolist() == [[5, -1]]
    assert dequantize(record).tolist() == [[1.0, -2.0]]


@pytest.mark.parametrize("scale", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_negative_extreme_reaches_the_lowest_code(bits: int, scale: str) -> None:
    """The `full` rule promises it; a scale that was rounded up must not break the promise."""
    weights = torch.rand(64, 32) * 0.9
    weights[:, 7] = -(torch.rand(64) + 1)
    record = quantize(weights, QuantKey.parse(f"int{bits}:group32:{scale}"))
    if scale == "f32":  # the tie is then decided by the rounding of a quotient, almost always to even
        assert (record["codes"][:, 7] == -(1 << (bits - 1))).float().mean() > 0.5
    else:
        assert bool((record["codes"][:, 7] == -(1 << (bits - 1))).all())
