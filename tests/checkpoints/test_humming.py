"""Humming: configurations, second-level scales, float zero points, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.checkpoints.humming import Humming
from fewbit.checkpoints.interface import StoredLayer
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.packing.registry import dequantize_record, packings
from fewbit.spec import LinearKey, QuantKey
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer
from tests.golden import ids, words

HUMMING = Humming()


def key_of(**config: Any) -> str:
    return str(HUMMING.scheme({"quant_method": "humming", **config}).rules[-1].key)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"b_dtype": "uint4", "bs_dtype": "bfloat16", "weight_scale_group_size": 128}, "int4:group128:bf16"),
        ({"weight_dtype": "int3", "scale_dtype": "float16", "group_size": 64}, "int3:group64:f16"),
        ({"dtype": "uint8"}, "int8:channel:bf16"),
        ({"dtype": "uint8", "group_size": -1}, "int8:channel:bf16"),
        ({"dtype": "uint8", "scale_type": "tensor"}, "int8:tensor:f32"),
        ({"dtype": "uint5", "group_size": 32, "has_zero_point": True}, "int5:asym:group32:bf16"),
        (
            {"dtype": "uint4", "group_size": 32, "has_zero_point": True, "is_fp_zero_point": True},
            "uint4:asym:group32:bf16",
        ),
        ({"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}, "e2m1:group32:e8m0"),
        ({"dtype": "float6_e3m2", "scale_dtype": "float8_e4m3", "group_size": 32}, "e3m2:group32:e4m3"),
        ({"dtype": "float8e4m3", "group_size": 128, "group_size_n": 64}, "e4m3:block64x128:f32"),
        (
            {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"},
            "e2m1:group16:e4m3/tensor:f32",
        ),
        (
            {"dtype": "uint4", "group_size": 64, "weight_scale_2_type": "channel", "a_dtype": "int8"},
            "int4:group64:bf16/channel:f32 * int8:token:f32:dynamic",
        ),
        (
            {"dtype": "float8e4m3", "a_dtype": "float8e4m3", "input_quant_mode": "static_tensor"},
            "e4m3:channel:bf16 * e4m3:tensor:f32",
        ),
        (
            {"dtype": "float4e2m1", "a_dtype": "float8e4m3", "input_scale_group_size": 128},
            "e2m1:channel:bf16 * e4m3:group128:f32:dynamic",
        ),
        ({"dtype": "uint4", "a_dtype": "bfloat16"}, "int4:channel:bf16"),
        ({"dtype": "uint4", "a_dtype": "int8", "input_quant_mode": "none"}, "int4:channel:bf16"),
    ],
)
def test_what_configurations_mean(config: dict[str, Any], key: str) -> None:
    assert key_of(**config) == key


@pytest.mark.parametrize(
    ("config", "words_found"),
    [
        ({"dtype": "float4e0m3"}, "b_dtype is 'float4e0m3'"),
        ({"dtype": "uint9"}, "uint9"),
        ({}, "b_dtype is None"),
        ({"dtype": "uint4", "scale_dtype": "float8e5m3"}, "float8e5m3"),
        ({"dtype": "uint4", "hadamard_block_size": 64}, "hadamard_block_size is 64"),
        ({"dtype": "uint4", "scale_type": "row"}, "weight_scale_type is 'row'"),
        ({"dtype": "uint4", "scale_type": "block"}, "weight_scale_type is 'block'"),
        ({"dtype": "uint4", "scale_2_type": "group"}, "weight_scale_2_type is 'group'"),
        ({"dtype": "uint4", "a_dtype": "int8", "input_quant_mode": "dynamic_group_token"}, "dynamic_group_token"),
        ({"dtype": "uint4", "ignore": "lm_head"}, "ignore is 'lm_head'"),
        ({"dtype": "uint4", "dynamic": ["x"]}, "dynamic is"),
    ],
)
def test_what_is_refused_by_name(config: dict[str, Any], words_found: str) -> None:
    with pytest.raises(CheckpointError, match=words_found):
        key_of(**config)


def test_rules_by_name_are_read_and_written() -> None:
    keys = {
        "model.layers.0.mlp.up_proj": KEYS["W4A16"],
        "model.layers.1.mlp.up_proj": KEYS["W4A16"],
        "model.layers.1.mlp.down_proj": KEYS["int3:group32:f32"],
        "model.layers.10.mlp.down_proj": KEYS["FP8_DYNAMIC"],
    }
    config = HUMMING.config(keys, ["model.layers.0.mlp.gate_proj"])
    scheme = HUMMING.scheme(config)
    for name, key in keys.items():
        assert scheme.key_for(name, "Linear", HUMMING.matcher) == key
    for plain in ("model.layers.0.mlp.gate_proj", "lm_head"):
        assert scheme.key_for(plain, "Linear", HUMMING.matcher) is None
    read = HUMMING.scheme({**config, "dynamic": {"-:.*self_attn": {}, r"+:.*\.0\.": {"b_dtype": "uint8"}}})
    assert read.key_for("model.layers.1.self_attn.q_proj", "Linear", HUMMING.matcher) is None
    assert str(read.key_for("model.layers.0.mlp.up_proj", "Linear", HUMMING.matcher)) == "int8:group128:bf16"


@pytest.mark.parametrize("name", ids("humming_int"))
def test_golden_words(name: str, golden: dict[str, Any]) -> None:
    bits = int(name.removeprefix("humming_int"))
    codes = torch.tensor(golden[name]["codes_out_in"]) - (1 << (bits - 1))  # unsigned on disk, signed here
    key = LinearKey.parse(f"int{bits}:channel:f32")
    record = QuantizedTensor(
        key.weight, tuple(codes.shape), {"codes": codes.to(torch.int8), "scale": torch.ones(len(codes), 1)}
    )
    stored = words(golden[name]["weight_int32"])
    assert torch.equal(HUMMING.write(record, key)["weight"], stored)
    back = HUMMING.read(StoredLayer(key), {"weight": stored, "weight_scale": torch.ones(len(codes), 1)}, record.shape)
    assert torch.equal(dequantize_record(back), codes.float())


def test_float_zero_points_are_exact() -> None:
    key = LinearKey.parse("uint4:asym:group32:f16")
    record = layer(key, (8, 64)).with_tensors(zero_point=torch.full((8, 2), 7.2, dtype=torch.float16))
    record = record.with_tensors(scale=record["scale"].half())
    back = HUMMING.read(StoredLayer(key), HUMMING.write(record, key), (8, 64))
    codes = record["codes"].float().unflatten(-1, (2, 32))
    expected = (codes - record["zero_point"].float()[..., None]) * record["scale"].float()[..., None]
    assert torch.equal(dequantize_record(back), expected.flatten(-2))
    with pytest.raises(OutputError, match=r"stores the zero points of .* as floats"):
        HUMMING.write(record.with_tensors(zero_point=torch.ones(8, 2, dtype=torch.uint8)), key)


def test_float_zero_points_are_not_packed_as_integers() -> None:
    key = KEYS["W4A16_ASYM"]
    record = layer(key)
    floating = record.with_tensors(zero_point=record["zero_point"].float())
    for found in (HUMMING, CompressedTensors()):
        with pytest.raises(OutputError, match=r"as integers, found torch\.float32"):
            found.write(floating, key)


def test_multipliers_and_divisors_give_equal_numbers_b37() -> None:
    """B37: Humming stores NVFP4's second level as a multiplier, compressed-tensors as a divisor."""
    key = KEYS["NVFP4A16"]
    record = layer(key)
    ours = HUMMING.write(record, key)
    theirs = CompressedTensors().write(record, key)
    assert ours["weight_scale_2"].item() == 1 / theirs["weight_global_scale"].item()
    back = HUMMING.read(StoredLayer(key), ours, SHAPE)
    other = CompressedTensors().read(StoredLayer(key, "nvfp4-pack-quantized"), theirs, SHAPE)
    assert torch.equal(dequantize_record(back), dequantize_record(other))


def test_negative_scales_are_right() -> None:
    key = KEYS["int4:group32:f32"]
    record = quantize(torch.randn(8, 64), key.weight)
    negative = record.with_tensors(scale=-record["scale"])
    back = HUMMING.read(StoredLayer(key), HUMMING.write(negative, key), (8, 64))
    assert torch.equal(dequantize_record(back), -dequantize_record(record))


@pytest.mark.parametrize(
    ("key", "shape", "found"),
    [
        ("int3:channel:f32", (8, 40), "3-bit codes along K=40"),
        ("int3:asym:group32:f32", (8, 64), "3-bit codes along N=8"),
        ("int4:group32:f32", (8, 48), "group32 does not divide K=48"),
        ("e4m3:block64x64:f32", (100, 128), "block64x64 does not divide N=100"),
        ("e4m3:tensor:bf16", (8, 64), "scales per tensor are f32"),
        ("uint4:group32:f16", (8, 64), "unsigned elements"),
        ("uint4b8:group32:f16", (8, 64), "its elements are"),
        ("int4:channel:f32/channel:f32", (8, 64), "a second scale stands over groups"),
        ("int4:channel:f32 * int8:asym:token:f32:dynamic", (8, 64), "activations of int8:asym"),
        ("int4:channel:f32 * e4m3:tensor:f32:dynamic", (8, 64), "activations of e4m3:tensor:f32:dynamic"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], found: str) -> None:
    assert found in (HUMMING.refuse(LinearKey.parse(key), shape) or "")


def test_groups_of_the_whole_row_are_one_scale_b32() -> None:
    """B32: 0, -1 and nothing at all mean one scale for each output feature."""
    for size in (0, -1, None):
        assert key_of(dtype="uint4", weight_scale_group_size=size) == "int4:channel:bf16"


def test_a_symmetric_layer_is_told_from_its_tensors() -> None:
    tensors = HUMMING.write(layer(KEYS["W4A16"]), KEYS["W4A16"])
    scheme = HUMMING.scheme({"quant_method": "humming", "dtype": "uint8", "group_size": 128})
    described = HUMMING.describe(scheme, "x", headers(tensors), "Linear", SHAPE)
    assert described == StoredLayer(KEYS["W4A16"])  # 4 bits, whatever the configuration says
    assert QuantKey.parse("int4:group128:bf16") == described.key.weight
    assert packings()["dense"].packed_shape(SHAPE, HUMMING.layouts(described)[0]) == tuple(tensors["weight"].shape)
