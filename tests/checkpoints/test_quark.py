"""Quark: specs, the order in which its configurations count, and its integers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.checkpoints.quark import Quark
from fewbit.checkpoints.quark_config import matches_quark
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer, same_bits

QUARK = Quark()
MODULE = "model.layers.0.mlp.down_proj"


def spec(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    axis = {"per_channel": 0, "per_group": -1}.get(qscheme)
    return {"dtype": dtype, "qscheme": qscheme, "ch_axis": axis, "is_dynamic": False, "symmetric": True, **more}


FP8 = spec("fp8_e4m3", "per_tensor")
MXFP4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0", symmetric=None)
INT4 = spec("int4", "per_group", group_size=32)
UINT4 = spec("uint4", "per_group", group_size=32, symmetric=False)


def config(weight: Any, activation: Any = None, **more: Any) -> dict[str, Any]:
    usual = {"weight": weight, "input_tensors": activation, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": usual, "export": {"pack_method": "reorder"}, **more}


def read(found: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> tuple[str, QuantizedTensor]:
    stored = QUARK.describe(QUARK.scheme(found), MODULE, headers(tensors))
    assert stored is not None
    return str(stored.key), QUARK.read(stored, tensors, shape)


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "activation", "key"),
    [
        (FP8, FP8, "e4m3:tensor:bf16 * e4m3:tensor:f32"),
        (FP8, FP8 | {"is_dynamic": True}, "e4m3:tensor:bf16 * e4m3:tensor:f32:dynamic"),
        (
            spec("fp8_e4m3", "per_channel"),
            spec("fp8_e4m3", "per_channel", ch_axis=1, is_dynamic=True),
            "e4m3:channel:bf16 * e4m3:token:f32:dynamic",
        ),
        (
            spec("fp8_e4m3", "per_block", block_size=[128, 128]),
            spec("fp8_e4m3", "per_group", group_size=128, is_dynamic=True),
            "e4m3:block128x128:bf16 * e4m3:group128:f32:dynamic",
        ),
        (spec("fp8_e5m2", "per_tensor"), None, "e5m2:tensor:bf16"),
        (
            spec("fp8_e4m3", "per_group", group_size=32, scale_format="e8m0"),
            spec("fp8_e4m3", "per_group", group_size=32, scale_format="e8m0", is_dynamic=True),
            "e4m3:group32:e8m0 * e4m3:group32:e8m0:dynamic",
        ),
        (spec("fp8_e4m3", "per_block", block_size=[32, 32], scale_format="e8m0"), None, "e4m3:block32x32:e8m0"),
        (MXFP4, MXFP4 | {"is_dynamic": True}, "e2m1:group32:e8m0 * e2m1:group32:e8m0:dynamic"),
        (MXFP4, FP8, "e2m1:group32:e8m0 * e4m3:tensor:f32"),
        (MXFP4 | {"dtype": "fp6_e2m3"}, None, "e2m3:group32:e8m0"),
        (MXFP4 | {"dtype": "fp6_e3m2"}, None, "e3m2:group32:e8m0"),
        (
            [spec("fp4", "per_group", group_size=16), FP8 | {"is_scale_quant": True}],
            [spec("fp4", "per_group", group_size=16, is_dynamic=True), FP8 | {"is_scale_quant": True}],
            "e2m1:group16:e4m3/tensor:f32 * e2m1:group16:e4m3:dynamic/tensor:f32",
        ),
        ([MXFP4], None, "e2m1:group32:e8m0"),
        (INT4, None, "int4:group32:bf16"),
        (INT4 | {"symmetric": None}, None, "int4:asym:group32:bf16"),
        (UINT4, None, "int4:asym:group32:bf16"),
        (UINT4 | {"symmetric": True}, None, "int4:asym:group32:bf16"),
        (spec("int3", "per_channel"), None, "int3:channel:bf16"),
        (spec("uint2", "per_group", group_size=32, symmetric=False), None, "int2:asym:group32:bf16"),
        (
            spec("int8", "per_channel"),
            spec("int8", "per_tensor", symmetric=False),
            "int8:channel:bf16 * int8:asym:tensor:f32",
        ),
    ],
)
def test_specs(weight: Any, activation: Any, key: str) -> None:
    (rule,) = QUARK.scheme(config(weight, activation)).rules
    assert str(rule.key) == key
    assert rule.targets == ("Linear",)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (config(MXFP4 | {"dtype": "mx", "mx_element_dtype": "fp4"}), "weight.dtype is 'mx'.*current Quark"),
        (config(FP8 | {"dtype": "mx9"}), "'mx9'"),
        (config(FP8 | {"dtype": "int2"}), "'int2'"),
        (config(MXFP4 | {"scale_format": "e5m3"}), "scale_format is 'e5m3'"),
        (config(UINT4 | {"zero_point_type": "float32"}), "float32 zero points"),
        (config(INT4 | {"group_size": None}), "per_group"),
        (config(INT4 | {"group_size": -1}), "group_size -1"),
        (config(INT4 | {"ch_axis": 0}), "ch_axis 0"),
        (config(spec("int8", "per_channel", ch_axis=1)), "ch_axis 1"),
        (config(spec("fp8_e4m3", "per_block")), "block_size None"),
        (config(spec("fp8_e4m3", "per_block", block_size=[128])), r"block_size \[128\]"),
        (config(FP8, spec("int8", "per_channel", ch_axis=1)), "static"),
        (config(FP8, spec("uint8", "per_tensor")), "must be signed"),
        (config([FP8, INT4]), "fp8_e4m3 over per_group int4"),
        (config([MXFP4, FP8, FP8]), "3 stages"),
        (config("fp8"), "weight is 'fp8'"),
        (config(FP8, exclude="lm_head"), "exclude is 'lm_head'"),
        (config(FP8, export={"pack_method": "other"}), "'other'"),
        (config(FP8, softmax_quant_spec=FP8), "softmax_quant_spec"),
        (config(FP8, layer_quant_config=[1]), r"layer_quant_config is \[1\]"),
        (
            {"global_quant_config": {"weight": FP8, "bias": FP8}},
            "global_quant_config.bias is quantized",
        ),
        (
            {"global_quant_config": {"weight": FP8, "output_tensors": FP8}},
            "global_quant_config.output_tensors are quantized.*KV cache only",
        ),
        (config(UINT4, layer_quant_config={"a": {"weight": INT4 | {"symmetric": False}}}), "int4 and uint4"),
    ],
)
def test_what_is_not_supported_is_named(found: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        QUARK.scheme(found)


def test_names_beat_classes_and_classes_the_whole() -> None:
    scheme = QUARK.scheme(
        config(
            FP8,
            layer_type_quant_config={"Conv1D": {"weight": MXFP4}},
            layer_quant_config={"*down_proj": {"weight": INT4}, "*gate": {"weight": None}},
            exclude=["lm_head", "re:.*layers\\.1\\.", "*visual*"],
        )
    )
    found = {
        (name, kind): str(scheme.key_for(name, kind, QUARK.matcher)).split(":")[0]
        for name, kind in (
            ("layers.0.up_proj", "Linear"),
            ("layers.0.down_proj", "Linear"),
            ("layers.0.down_proj", "Conv1D"),
            ("layers.0.up_proj", "Conv1D"),
            ("layers.0.gate", "Linear"),
            ("layers.1.up_proj", "Linear"),
            ("layers.11.up_proj", "Linear"),
            ("visual.0", "Linear"),
            ("lm_head", "Linear"),
            ("layers.0.norm", "RMSNorm"),
        )
    }
    assert list(found.values()) == ["e4m3", "int4", "int4", "e2m1", "None", "None", "e4m3", "None", "None", "None"]


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("lm_head", "lm_head", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate.linear", False),
        ("mlp.gate", "model.layers.0.mlp.gate", False),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        ("re:model.layers.0", "model.layers.0.mlp.gate", True),
        ("", "x", False),
    ],
)
def test_names(pattern: str, name: str, matched: bool) -> None:
    assert matches_quark(pattern, name) is matched


@pytest.mark.parametrize("place", ["layer_quant_config", "kv_cache_quant_config"])
def test_the_cache_is_read_from_the_outputs_of_its_projections(place: str) -> None:
    projections = {pattern: {"weight": FP8, "output_tensors": FP8} for pattern in ("*k_proj", "*v_proj")}
    export = {"kv_cache_group": list(projections), "pack_method": "reorder"}
    scheme = QUARK.scheme(config(FP8, export=export, **{place: projections}))
    assert str(scheme.kv_cache) == "e4m3:tensor:f32"
    tensors = QUARK.write(layer(KEYS["e4m3:tensor:f32"]), KEYS["e4m3:tensor:f32"]) | {"output_scale": torch.ones(())}
    stored = QUARK.describe(scheme, "model.layers.0.self_attn.k_proj", headers(tensors))
    assert stored is not None
    assert "output_scale" not in {spec.name for spec in QUARK.specs(stored)}


def test_several_keys_are_written_by_names() -> None:
    keys = ("int4:asym:group32:f16", "int3:channel:bf16", "e2m1:group32:e8m0 * e4m3:tensor:f32", "int8:channel:bf16")
    layers = {f"layer{index}": LinearKey.parse(key) for index, key in enumerate(keys)} | {"last": KEYS["NVFP4"]}
    layers |= {"usual": layers["layer0"]}
    written = QUARK.config(layers, ["lm_head"])
    assert written["layer_quant_config"].keys() == {"layer1", "layer2", "layer3", "last"}
    scheme = QUARK.scheme(written)
    for name, key in layers.items():
        tensors = QUARK.write(layer(key), key)
        stored = QUARK.describe(scheme, name, headers(tensors))
        assert stored is not None
        assert stored.key == key
        assert same_bits(
            dequantize_record(QUARK.read(stored, tensors, SHAPE)), dequantize_record(layer_of(key, tensors))
        )
    with pytest.raises(OutputError, match="int5"):
        QUARK.config({"a": LinearKey.parse("int5:channel:bf16")}, [])


def layer_of(key: LinearKey, tensors: dict[str, Tensor]) -> QuantizedTensor:
    return QUARK.read(QUARK.written_as(key), tensors, SHAPE)


# --- integers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reorder", "order"])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize("qscheme", ["per_group", "per_channel"])
def test_four_bits_against_a_plain_loop(method: str, dtype: str, qscheme: str) -> None:
    """B26: zero points that differ from row to row follow the order of the codes."""
    rows, columns, size = 16, 64, 32
    low = -8 if dtype == "int4" else 0
    codes = torch.randint(low, low + 16, (rows, columns))
    groups = columns // size if qscheme == "per_group" else 1
    zeros = (torch.arange(rows)[:, None] + torch.arange(groups)) % 16 + low
    scale = torch.rand(rows, groups).bfloat16()
    order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "reorder" else list(range(8))

    def packed(matrix: Tensor) -> Tensor:
        nibbles = (matrix & 15).reshape(matrix.shape[0], -1, 8)
        words = sum(nibbles[..., code] << (4 * position) for position, code in enumerate(order))
        return torch.where(words >= 1 << 31, words - (1 << 32), words).int()

    if qscheme == "per_group":
        tensors = {
            "weight": packed(codes.T),
            "weight_scale": scale.T.contiguous(),
            "weight_zero_point": packed(zeros.T),
        }
    else:
        tensors = {"weight": packed(codes), "weight_scale": scale[:, 0], "weight_zero_point": packed(zeros.T)[0]}
    weight = spec(dtype, qscheme, group_size=size, symmetric=False)
    _, record = read(config(weight, export={"pack_method": method}), tensors, (rows, columns))
    width = columns // groups
    expected = (codes - zeros.repeat_interleave(width, 1)) * scale.float().repeat_interleave(width, 1)
    assert torch.equal(dequantize_record(record), expected)


def test_integers_of_eight_bits_are_signed_or_not() -> None:
    record = unpack_record(layer(KEYS["int8:asym:tensor:f32"]))
    signed = QUARK.write(record, KEYS["int8:asym:tensor:f32"])
    unsigned = {
        "weight": (signed["weight"].int() + 128).to(torch.uint8),
        "weight_scale": signed["weight_scale"].reshape(()),
        "weight_zero_point": (signed["weight_zero_point"].int() + 128).to(torch.uint8).reshape(()),
    }
    _, first = read(config(spec("int8", "per_tensor", symmetric=False)), signed, SHAPE)
    _, second = read(config(spec("uint8", "per_tensor", symmetric=False)), unsigned, SHAPE)
    assert torch.equal(dequantize_record(first), dequantize_record(second))
    assert torch.equal(dequantize_record(first), dequantize_record(record))


def test_groups_of_eight_bits_are_transposed() -> None:
    record = layer(KEYS["int8:group32:f32"])
    tensors = QUARK.write(record, KEYS["int8:group32:f32"])
    assert torch.equal(tensors["weight"], record["codes"].T)
    assert torch.equal(tensors["weight_scale"], record["scale"].T)
    assert tensors["weight_zero_point"].shape == (SHAPE[1] // 32, SHAPE[0])


@pytest.mark.parametrize("key", ["int4:group32:f32", "int4:channel:bf16", "int8:channel:bf16 * int8:tensor:f32"])
def test_symmetric_layers_store_zeros_and_read_none(key: str) -> None:
    """B21 and B48: symmetric comes from the configuration, whatever the tensors of zero points hold."""
    tensors = QUARK.write(layer(KEYS[key]), KEYS[key])
    zeros = [name for name in tensors if name.endswith("zero_point")]
    assert "weight_zero_point" in zeros
    assert not any(tensors[name].any() for name in zeros)
    found = QUARK.config({MODULE: KEYS[key]}, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, expected = read(found, tensors, SHAPE)
        _, without = read(found, {name: tensor for name, tensor in tensors.items() if name not in zeros}, SHAPE)
    assert not {"zero_point", "input_zero_point"} & expected.tensors.keys()
    assert torch.equal(dequantize_record(without), dequantize_record(expected))
    for name in zeros:
        with pytest.warns(UserWarning, match="that is not zero; it is not read"):
            _, record = read(found, {**tensors, name: torch.full_like(tensors[name], 77)}, SHAPE)
        assert torch.equal(dequantize_record(record), dequantize_record(expected))


def test_rotations_at_run_time_are_refused() -> None:
    tensors = QUARK.write(layer(KEYS["W4A16"]), KEYS["W4A16"]) | {"input_rotation": torch.eye(4)}
    with pytest.raises(CheckpointError, match="input_rotation"):
        read(config(INT4 | {"group_size": 128}), tensors, SHAPE)


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("int5:group32:f32", SHAPE, "no storage"),
        ("int3:asym:channel:f32", SHAPE, "no storage"),
        ("int2:group32:f32", SHAPE, "no storage"),
        ("int4:tensor:f32", SHAPE, "no storage"),
        ("e2m1:channel:f32", SHAPE, "no storage"),
        ("int4:group32:f32", (8, 40), "K=40"),
        ("int3:channel:f32", (8, 42), "K=42"),
        ("int2:asym:group32:f32", (6, 64), "N=6"),
        ("e4m3:tensor:f32 * int4:token:f32:dynamic", SHAPE, "activations of int4"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], words: str) -> None:
    assert words in (QUARK.refuse(LinearKey.parse(key), shape) or "")


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("int4:group32:f32", (12, 64), "N=12"),
        ("int4:channel:f32", (8, 60), "K=60"),
        ("e4m3:block128x128:f32", (130, 256), "130x256"),
        ("int4:group32:f32", SHAPE, None),
    ],
)
def test_what_quark_itself_does_not_read(key: str, shape: tuple[int, int], words: str | None) -> None:
    said = QUARK.caution(LinearKey.parse(key), shape)
    assert said is None if words is None else words in (said or "")
