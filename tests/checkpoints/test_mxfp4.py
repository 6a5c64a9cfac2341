"""gpt-oss' MXFP4: stacks of experts, their names, and the single layers that it does not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.mxfp4 import Mxfp4
from fewbit.checkpoints.registry import find_format
from fewbit.errors import CheckpointError, OutputError, ShapeError
from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, headers, same_bits
from tests.golden import floats

MXFP4 = Mxfp4()
KEY = LinearKey.parse("e2m1:group32:e8m0")
STACK = "model.layers.3.mlp.experts.gate_up_proj"
SCHEME = MXFP4.scheme({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


@pytest.mark.parametrize("method", ["mxfp4", "gpt_oss_mxfp4", "MXFP4", "gpt-oss-mxfp4"])
def test_every_spelling_is_the_same_format_b14(method: str) -> None:
    """B14: two spellings of one quant_method are met."""
    assert isinstance(find_format({"quant_method": method}), Mxfp4)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"{STACK}_blocks", (STACK, "blocks")),
        (f"{STACK}_bias", (STACK, "bias")),
        ("model.layers.0.mlp.experts.down_proj_scales", ("model.layers.0.mlp.experts.down_proj", "scales")),
        ("model.layers.0.mlp.router.bias", ("model.layers.0.mlp.router", "bias")),
        ("model.layers.0.self_attn.sinks", ("model.layers.0.self_attn", "sinks")),
    ],
)
def test_names_are_taken_apart_and_joined(name: str, parts: tuple[str, str]) -> None:
    assert MXFP4.split(name) == parts
    assert MXFP4.join(*parts) == name


def test_golden_blocks(golden: dict[str, Any]) -> None:
    vector = golden["gptoss_mxfp4_blocks"]
    tensors = {
        "blocks": torch.tensor(vector["blocks"], dtype=torch.uint8),
        "scales": torch.tensor(vector["scales"], dtype=torch.uint8),
    }
    described = MXFP4.describe(SCHEME, STACK, headers(tensors))
    assert described == StoredLayer(KEY, shape=(1, 4, 64))
    record = MXFP4.read(described, tensors, described.shape)
    record.validate(STACK)
    input_major = dequantize_record(record).transpose(-1, -2)
    assert torch.equal(input_major, floats(vector["dequant_expert_in_out"]))
    written = MXFP4.write(record, KEY)
    assert all(same_bits(written[name], tensors[name]) for name in tensors)


@given(experts=st.integers(1, 4), rows=st.integers(1, 9), groups=st.integers(1, 4))
def test_stacks_of_any_shape_round_trip(experts: int, rows: int, groups: int) -> None:
    record = quantize(torch.randn(experts, rows, groups * 32), KEY.weight)
    tensors = MXFP4.write(record, KEY)
    assert tuple(tensors["blocks"].shape) == (experts, rows, groups, 16)
    described = MXFP4.describe(SCHEME, STACK, headers(tensors))
    assert described is not None
    assert described.shape == record.shape
    back = MXFP4.read(described, tensors, record.shape)
    assert torch.equal(dequantize_record(back), dequantize_record(record))
    again = MXFP4.write(back, KEY)
    assert all(same_bits(again[name], tensors[name]) for name in tensors)


def test_a_share_of_a_stack_is_whole_groups_b47() -> None:
    """B47: a rank's window may not cut a block of 32; the refusal says with which numbers."""
    specs = MXFP4.specs(StoredLayer(KEY))
    for spec in specs:
        assert spec.shard("K", 2880, 1, 3) == (1, 30, 30)
        with pytest.raises(ShapeError, match="2880 features are no multiple of 4 x 32"):
            spec.shard("K", 2880, 0, 4)


def test_what_it_does_not_hold() -> None:
    record = quantize(torch.randn(8, 64), KEY.weight)
    with pytest.raises(OutputError, match=r"stacks of experts .* found \[8, 64\]"):
        MXFP4.write(record, KEY)
    with pytest.raises(OutputError, match="int4"):
        MXFP4.write(quantize(torch.randn(2, 8, 64), KEYS["W4A16"].weight), KEYS["W4A16"])
    with pytest.raises(OutputError, match="nothing else"):
        MXFP4.config({STACK: KEYS["W4A16"]}, [])
    assert MXFP4.refuse(KEY, (2, 8, 40)) == "groups of 32 weights do not divide K=40"


def test_scales_without_blocks_and_blocks_without_scales() -> None:
    scales = {"scales": TensorHeader("U8", (2, 8, 2))}
    blocks = {"blocks": TensorHeader("U8", (2, 8, 2, 16))}
    for found in (scales, blocks):
        with pytest.raises(CheckpointError, match=STACK):
            MXFP4.describe(SCHEME, STACK, found)
    wrong = blocks | {"scales": TensorHeader("U8", (2, 8, 3))}
    with pytest.raises(CheckpointError, match="scales has shape"):
        MXFP4.describe(SCHEME, STACK, wrong)


def test_attention_and_routers_stay_plain() -> None:
    scheme = MXFP4.scheme({"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]})
    assert scheme.key_for(STACK, "", MXFP4.matcher) == KEY
    for plain in ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.router", "lm_head"):
        assert scheme.key_for(plain, "Linear", MXFP4.matcher) is None
    with pytest.raises(CheckpointError, match="modules_to_not_convert is 'lm_head'"):
        MXFP4.scheme({"modules_to_not_convert": "lm_head"})
