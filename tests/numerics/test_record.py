"""The hub record: what it holds, what it stands for, and which of its parts do not fit together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.numerics import QuantizedTensor, dequantize, quantize
from fewbit.spec import QuantKey
from tests.numerics.grid import spread

# --- records that no quantize makes, but files hold ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["int4:group16:f32", "uint4:asym:group16:f16", "uint4b8:group8:f16"])
def test_act_order_dequantizes_by_the_group_of_each_feature(text: str) -> None:
    key, numbers = QuantKey.parse(text), torch.randn(6, 64)
    shuffle = torch.randperm(64)
    sorted_record = quantize(numbers[:, shuffle], key)  # groups are runs of the shuffled features
    order = torch.empty(64, dtype=torch.int32)
    order[shuffle] = (torch.arange(64) // key.granularity.columns).int()
    codes = torch.empty_like(sorted_record["codes"])
    codes[:, shuffle] = sorted_record["codes"]
    record = sorted_record.with_tensors(codes=codes, order=order)
    assert torch.equal(dequantize(record)[:, shuffle], dequantize(sorted_record))


def test_act_order_of_natural_groups_changes_nothing() -> None:
    record = quantize(torch.randn(2, 3, 50), QuantKey.parse("uint4:asym:group16:f32"))
    assert torch.equal(dequantize(record.with_tensors(order=torch.arange(50) // 16)), dequantize(record))


def test_negative_scales_are_legal() -> None:
    record = quantize(torch.randn(4, 32), QuantKey.parse("int4:group16:f32"))
    flipped = record.with_tensors(scale=-record["scale"])
    assert torch.equal(dequantize(flipped), -dequantize(record))


def test_a_float_minimum_is_added_after_scaling() -> None:
    record = quantize(torch.rand(4, 50), QuantKey.parse("uint4:group16:f32"))
    minimum = torch.randn(4, 4)
    expected = dequantize(record) + spread(minimum, record).float()
    assert torch.equal(dequantize(record.with_tensors(minimum=minimum)), expected)


def test_scales_of_scales() -> None:
    record = quantize(torch.randn(4, 64), QuantKey.parse("int4:group16:f32"))
    nested = quantize(record["scale"], QuantKey.parse("uint8:channel:f32"))
    doubly = record.with_tensors(scale=nested)
    doubly.validate()
    assert torch.equal(dequantize(doubly), dequantize(record.with_tensors(scale=dequantize(nested))))


def test_a_codebook_gives_the_numbers_of_the_codes() -> None:
    codebook = torch.linspace(-1, 1, 16)
    codes = torch.arange(32, dtype=torch.uint8).reshape(1, 32) % 16
    scale = torch.tensor([[2.0, 3.0]])
    record = QuantizedTensor(
        QuantKey.parse("uint4:group16:f32"), (1, 32), {"codes": codes, "scale": scale, "codebook": codebook}
    )
    assert torch.equal(dequantize(record), torch.cat([codebook * 2, codebook * 3])[None])


# --- the record itself -----------------------------------------------------------------------------------------------


def _record() -> QuantizedTensor:
    return quantize(torch.randn(8, 50), QuantKey.parse("int4:asym:group16:f16"))


def test_with_tensors_leaves_the_first_record_alone() -> None:
    record = _record()
    other = record.with_tensors(scale=record["scale"] * 2, pre_scale=torch.ones(50))
    assert "pre_scale" in other
    assert "pre_scale" not in record
    assert not torch.equal(other["scale"], record["scale"])


def test_bytes_are_counted() -> None:
    record = _record()
    assert record.nbytes == 8 * 50 + 8 * 4 * 2 + 8 * 4
    assert record.bits_per_weight == 8 * record.nbytes / 400
    assert quantize(torch.zeros(0, 16), QuantKey.parse("int4:group16:f16")).bits_per_weight == 0


def test_an_unknown_role_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="weigth"):
        _record().with_tensors(weigth=torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"scale": torch.ones(8, 3)}, r"scale has shape \(8, 3\), needed \(8, 4\)"),
        ({"zero_point": torch.zeros(8, dtype=torch.int8)}, "zero_point has shape"),
        ({"codes": torch.zeros(8, 49, dtype=torch.int8)}, "codes has shape"),
        ({"codes": torch.zeros(8, 50, dtype=torch.uint8)}, "codes are torch.uint8, needed torch.int8"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Tensor], named: str) -> None:
    record = _record()
    record.validate()
    with pytest.raises(ShapeError, match=f"layers.0: {named}"):
        record.with_tensors(**change).validate("layers.0")
