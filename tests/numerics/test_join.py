"""Joined and stacked records stand for their members' numbers, and come apart again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.numerics import QuantizedTensor, decode, dequantize, quantize
from fewbit.numerics.join import Joined, join, refuse_join, split, stack, unstack
from fewbit.spec import LinearKey, QuantKey
from tests.checkpoints.layers import KEYS, layer

NVFP4 = KEYS["NVFP4A16"].weight
FP8 = QuantKey.parse("e4m3:tensor:f32")
INT8 = QuantKey.parse("int8:tensor:f32")
ROWS = (32, 16, 16)


def members(key: LinearKey, rows: tuple[int, ...] = ROWS, columns: int = 256) -> list[QuantizedTensor]:
    return [layer(key, (count, columns)) for count in rows]


def with_second_level(factors: list[float], columns: int = 64) -> list[QuantizedTensor]:
    return [
        quantize(torch.randn(count, columns) * factor * 2000, NVFP4, global_scale=torch.full((1, 1), factor).double())
        for count, factor in zip(ROWS, factors, strict=True)
    ]


def product(record: QuantizedTensor, x: Tensor) -> Tensor:
    """x @ W.T in float64, from codes and scales by the definition, one output feature after the other."""
    codes = decode(record["codes"], record.key.element).double()
    scale = decode(record["scale"], record.key.scale.element).double()
    if "global_scale" in record:
        scale = scale * record["global_scale"]
    rows, columns = record.key.granularity.extents(record.shape)
    out = torch.empty(x.shape[0], record.shape[0], dtype=torch.float64)
    for n in range(record.shape[0]):
        zero = decode(record["zero_point"], record.key.element).double() if "zero_point" in record else None
        terms = torch.zeros(x.shape[0], dtype=torch.float64)
        for k in range(record.shape[1]):
            at = (n // rows, k // columns)
            terms += x[:, k] * (codes[n, k] - (zero[at] if zero is not None else 0)) * scale[at]
        out[:, n] = terms
    return out


def check_apart(joined: Joined, records: list[QuantizedTensor]) -> None:
    """The inverse gives members that stand for what they have in the joined record."""
    for part, record in zip(split(joined.record, joined.rows, joined.keys), records, strict=True):
        part.validate()
        assert part.shape == record.shape
        if joined.is_exact:
            assert torch.equal(dequantize(part), dequantize(record))
    whole = torch.cat([dequantize(part) for part in split(joined.record, joined.rows)])
    assert torch.equal(whole, dequantize(joined.record))


@pytest.mark.parametrize("name", sorted(KEYS))
def test_every_key_joins_and_comes_apart(name: str) -> None:
    records = members(KEYS[name])
    joined = join(records)
    joined.record.validate()
    assert joined.record.shape == (64, 256)
    check_apart(joined, records)
    if KEYS[name].weight.element.is_integer or KEYS[name].weight.granularity.kind != "tensor":
        assert joined.is_exact
        assert torch.equal(dequantize(joined.record), torch.cat([dequantize(record) for record in records]))


@pytest.mark.parametrize("name", sorted(KEYS))
def test_every_key_stacks_and_comes_apart(name: str) -> None:
    records = members(KEYS[name], (16, 16, 16), 128)
    stacked = stack(records)
    stacked.validate()
    assert torch.equal(dequantize(stacked), torch.stack([dequantize(record) for record in records]))
    for part, record in zip(unstack(stacked), records, strict=True):
        part.validate()
        assert torch.equal(dequantize(part), dequantize(record)) and part.key == record.key


@given(factors=st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_b35_ratios_that_e4m3_holds_are_folded(factors: list[int]) -> None:
    """Defect B35: members of NVFP4 under second levels a power of two apart, of which block scales take the ratio."""
    records = with_second_level([2.0 ** -(9 + factor) for factor in factors])
    for record in records:  # block scales far from E4M3's subnormals, so that halving them is exact
        record["scale"].copy_((torch.rand(record["scale"].shape) * 200 + 100).to(torch.float8_e4m3fn))
    joined = join(records)
    assert joined.record.key == NVFP4
    assert joined.ratios == tuple(2.0 ** (min(factors) - factor) for factor in factors)
    check_apart(joined, records)
    x = torch.randn(3, 64, dtype=torch.float64)
    apart = torch.cat([product(record, x) for record in records], dim=1)
    assert torch.allclose(product(joined.record, x), apart, rtol=1e-12)


@pytest.mark.parametrize("factors", [[1.0, 0.5, 0.1], [1e-3, 1.1e-3, 0.9e-3], [1.0, 2.0**-20, 1.0]])
def test_b35_other_members_keep_their_own_factor(factors: list[float]) -> None:
    """Defect B35: 1, 0.5 and 0.1; a ratio that block scales do not hold, or that would make them vanish."""
    records = with_second_level(factors)
    joined = join(records)
    assert str(joined.record.key) == "e2m1:group16:e4m3/channel:f32"
    assert joined.is_exact
    assert joined.ratios == pytest.approx([factor / max(factors) for factor in factors])
    joined.record.validate()
    x = torch.randn(3, 64, dtype=torch.float64)
    apart = torch.cat([product(record, x) for record in records], dim=1)
    assert torch.allclose(
        x @ dequantize(joined.record).double().T, apart, rtol=1e-6, atol=1e-6 * float(apart.abs().max())
    )
    parts = split(joined.record, joined.rows, joined.keys)
    for part, record in zip(parts, records, strict=True):
        assert part.key == record.key and torch.equal(part["global_scale"], record["global_scale"])


def test_fp8_members_take_the_largest_scale_and_say_what_it_cost() -> None:
    records = [quantize(torch.randn(count, 64) * size, FP8) for count, size in zip(ROWS, (1.0, 0.3, 0.05), strict=True)]
    joined = join(records)
    assert joined.record.key == FP8 and joined.record["scale"].shape == (1, 1)
    assert torch.equal(joined.record["scale"], records[0]["scale"])
    assert joined.sqnr_db[0] is None and all(loss is not None and 15 < loss < 45 for loss in joined.sqnr_db[1:])
    assert joined.ratios[0] == 1.0 and joined.ratios[2] < 0.1
    # The reference rounds the exact numbers to the nearest of all codes' numbers, in float64.
    grid = decode(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn), FP8.element).double()
    grid = grid[grid.isfinite()].unique() * records[0]["scale"].double().item()
    exact = torch.cat([dequantize(record).double() for record in records])
    nearest = (exact[..., None] - grid).abs().amin(-1)
    found = (exact - dequantize(joined.record).double()).abs()
    assert torch.allclose(found, nearest, atol=1e-6)  # each number is rounded to float32


def test_equal_fp8_scales_lose_nothing() -> None:
    scale = quantize(torch.ones(1, 1), FP8)["scale"]
    records = [quantize(torch.randn(count, 64).clamp(-1, 1), FP8).with_tensors(scale=scale) for count in ROWS]
    assert join(records).is_exact and join(records).record.key == FP8


def test_int8_members_get_a_scale_for_each_row() -> None:
    records = [
        quantize(torch.randn(count, 64) * size, INT8) for count, size in zip(ROWS, (1.0, 0.3, 0.05), strict=True)
    ]
    joined = join(records)
    assert str(joined.record.key) == "int8:channel:f32" and joined.is_exact
    assert torch.equal(joined.record["codes"], torch.cat([record["codes"] for record in records]))
    x = torch.randn(3, 64, dtype=torch.float64)
    assert torch.allclose(
        product(joined.record, x), torch.cat([product(record, x) for record in records], dim=1), rtol=1e-12
    )
    assert [part.key for part in split(joined.record, joined.rows, joined.keys)] == [INT8] * 3


def test_asymmetric_int8_members_keep_their_zero_points() -> None:
    key = QuantKey.parse("int8:asym:tensor:f32")
    records = [quantize(torch.randn(count, 64) + count / 16, key) for count in ROWS]
    joined = join(records)
    assert torch.equal(dequantize(joined.record), torch.cat([dequantize(record) for record in records]))
    check_apart(joined, records)


def test_blocks_that_a_seam_would_cut_become_groups() -> None:
    key = QuantKey.parse("e4m3:block32x32:f32")
    records = [quantize(torch.randn(count, 64), key) for count in (40, 64, 24)]
    joined = join(records)
    assert str(joined.record.key) == "e4m3:group32:f32" and joined.is_exact
    check_apart(joined, records)
    assert [part.key for part in split(joined.record, joined.rows, joined.keys)] == [key] * 3
    even = [quantize(torch.randn(count, 64), key) for count in (32, 64, 24)]
    assert join(even).record.key == key
    check_apart(join(even), even)


def test_the_largest_static_scale_of_the_input_serves_all() -> None:
    key = KEYS["e4m3:tensor:f32 * e4m3:tensor:f32"]
    records = [layer(key, (16, 64)).with_tensors(input_scale=torch.tensor(size)) for size in (0.5, 2.0, 1.0)]
    joined = join(records)
    assert joined.record["input_scale"] == 2.0 and joined.input_ratio == 4.0
    assert stack(records)["input_scale"] == 2.0


def test_members_that_do_not_go_together_are_refused() -> None:
    record = layer(KEYS["int4:group32:f32"], (16, 64))
    for other, sentence in (
        (layer(KEYS["int8:group32:f32"], (16, 64)), "members are int4:group32:f32 and int8:group32:f32"),
        (layer(KEYS["int4:group32:f32"], (16, 32)), "64 and 32 input features"),
        (record.with_tensors(pre_scale=torch.ones(64)), "only some members have pre_scale"),
    ):
        assert sentence in (refuse_join([record, other]) or "")
    assert refuse_join([record, record]) is None


def test_members_smoothed_apart_read_different_inputs() -> None:
    record = layer(KEYS["int4:group32:f32"], (16, 64))
    first, second = (record.with_tensors(pre_scale=torch.full((64,), factor)) for factor in (1.0, 2.0))
    assert "different pre scales" in (refuse_join([first, second]) or "")
