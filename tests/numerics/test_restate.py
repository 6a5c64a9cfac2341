"""Every restatement of a record stands for the same numbers, and says so in its shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.numerics.restate import reductions, restate, restatements, widenings
from fewbit.packing.registry import pack_record
from fewbit.spec import CHANNEL, ELEMENTS, TENSOR, QuantKey, block, group
from fewbit.spec.element import F16
from fewbit.spec.key import ScaleSpec
from fewbit.spec.layout import Layout
from tests.checkpoints.layers import KEYS, layer

LARGER = (TENSOR, CHANNEL, block(128, 128), block(64, 64), group(128), group(64), group(32))


@given(name=st.sampled_from(sorted(KEYS)), rows=st.integers(1, 140), groups=st.integers(1, 3), short=st.integers(0, 15))
def test_the_numbers_are_the_same(name: str, rows: int, groups: int, short: int) -> None:
    record = layer(KEYS[name], (rows, max(1, 128 * groups - short)))
    keys = list(restatements(record))
    assert keys[0] == record.key and len(set(keys)) == len(keys)
    for key in keys:
        again = restate(record, key)
        again.validate()
        assert again.key == key
        assert torch.equal(dequantize(again), dequantize(record)), key


def test_smaller_ones_come_first() -> None:
    record = layer(KEYS["int4:channel:bf16"], (8, 256))
    widths = [key.bits_per_weight(record.shape) for key in restatements(record)]
    assert widths == sorted(widths)


def test_unsigned_codes_and_their_zero_points_move_together() -> None:
    key = QuantKey(ELEMENTS["uint4"], ScaleSpec(F16, group(4)), symmetric=False)
    codes = torch.randint(0, 16, (3, 8), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (3, 2), dtype=torch.uint8)
    record = QuantizedTensor(key, (3, 8), {"codes": codes, "scale": torch.rand(3, 2).half(), "zero_point": zeros})
    signed = [key for key in restatements(record) if key.element.signed]
    assert signed
    for key in signed:
        assert torch.equal(dequantize(restate(record, key)), dequantize(record))


def test_scales_of_scales_are_multiplied_out() -> None:
    codes = torch.randint(-32, 32, (2, 32), dtype=torch.int8)
    groups = torch.randint(-128, 128, (2, 2), dtype=torch.int8)
    nested = QuantizedTensor(
        QuantKey.parse("int8:group2:f16"), (2, 2), {"codes": groups, "scale": torch.rand(2, 1).half()}
    )
    record = QuantizedTensor(QuantKey.parse("int6:group16:int8"), (2, 32), {"codes": codes, "scale": nested})
    own, *keys = restatements(record)
    assert own == record.key and restate(record, own) is record
    assert keys and all(key.scale.element.name == "f32" for key in keys)
    for key in keys:
        assert torch.equal(dequantize(restate(record, key)), dequantize(record))


def test_groups_under_act_order_stay() -> None:
    record = layer(KEYS["int4:group32:f32"], (4, 128)).with_tensors(order=torch.randperm(128).int() % 4)
    assert {key.granularity for key in restatements(record)} == {group(32)}
    for key in restatements(record):
        assert torch.equal(dequantize(restate(record, key)), dequantize(record))


@given(name=st.sampled_from(sorted(KEYS)), rows=st.integers(1, 140), columns=st.integers(1, 300))
def test_reductions_undo_restatements(name: str, rows: int, columns: int) -> None:
    """Whatever was written out for finer rectangles, or with zero points of zero, is found to be the same again."""
    record = layer(KEYS[name], (rows, columns))
    for key in restatements(record):
        again = restate(record, key)
        for reduced in reductions(again):
            assert torch.equal(dequantize(restate(again, reduced)), dequantize(record))
            restate(again, reduced).validate()
        coarser = key.granularity != record.key.granularity and record.key.granularity in LARGER
        if coarser and key.with_granularity(record.key.granularity) == record.key:
            assert record.key in reductions(again), key


def test_scales_that_differ_are_not_reduced() -> None:
    record = layer(KEYS["int4:group32:f32"], (4, 128))
    assert not list(reductions(record))
    record = record.with_tensors(scale=torch.full_like(record["scale"], 0.5))
    assert str(next(iter(reductions(record)))) == "int4:tensor:f32"


@given(name=st.sampled_from(sorted(KEYS)), rows=st.integers(1, 140), columns=st.integers(1, 300))
def test_wider_integers_hold_codes_less_their_zero_points(name: str, rows: int, columns: int) -> None:
    record = layer(KEYS[name], (rows, columns))
    for key in widenings(record):
        again = restate(record, key)
        again.validate()
        assert key.symmetric and key.element.bits > record.key.element.bits and "zero_point" not in again
        assert torch.equal(dequantize(again), dequantize(record)), key


def test_int4_with_zero_points_is_int5_without() -> None:
    key = QuantKey.parse("int4:asym:group4:f16")
    codes, zeros = torch.tensor([[-8, 7, 0, 1]]).to(torch.int8), torch.tensor([[7]]).to(torch.int8)
    record = QuantizedTensor(key, (1, 4), {"codes": codes, "scale": torch.ones(1, 1).half(), "zero_point": zeros})
    wider = next(iter(widenings(record)))
    assert str(wider) == "int5:group4:f16"
    assert restate(record, wider)["codes"].tolist() == [[-15, 0, -7, -6]]


@pytest.mark.parametrize(("scale", "exact"), [(2.0**-17 * 1.9921875, True), (2.0**-18 * 1.9921875, False)])
def test_bf16_scales_are_f16_ones_where_these_are_fine_enough(scale: float, exact: bool) -> None:
    record = layer(KEYS["int4:channel:bf16"], (2, 64))
    record = record.with_tensors(scale=torch.full_like(record["scale"], scale))
    found = [key for key in reductions(record) if key.scale.element == F16]
    assert bool(found) == exact
    for key in found:
        assert torch.equal(dequantize(restate(record, key)), dequantize(record)), key


def test_a_packed_record_is_not_restated() -> None:
    record = pack_record(layer(KEYS["int4:channel:bf16"], (4, 64)), Layout("dense", 4, "K", 32, 8))
    with pytest.raises(AssertionError, match="unpack"):
        restate(record, next(key for key in restatements(record) if key != record.key))
