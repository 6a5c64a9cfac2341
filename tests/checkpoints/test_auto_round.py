"""AutoRound: what settings mean, which layers they name, and which format's tensors a layer is stored in."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fewbit.checkpoints.auto_round import AutoRound
from fewbit.checkpoints.auto_round_config import matches_auto_round
from fewbit.checkpoints.awq import Awq
from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.checkpoints.gptq import Gptq
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.errors import CheckpointError, OutputError, SchemeError
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer

AUTO_ROUND, GPTQ, AWQ, CT = AutoRound(), Gptq(), Awq(), CompressedTensors()
SYM, ASYM = LinearKey.parse("int4:group64:f16"), LinearKey.parse("int4:asym:group64:f16")
BASE: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int"}
NVFP4 = "e2m1:group16:e4m3/tensor:f32"
BLOCK_FP8 = {"bits": 8, "group_size": [128, 128], "data_type": "fp8", "packing_format": "auto_round:fp8"}


def key_of(config: dict[str, Any], module: str = "model.layers.1.mlp.up_proj") -> str:
    return str(AUTO_ROUND.scheme(config).key_for(module, "Linear", matches_auto_round))


def described(config: dict[str, Any], tensors: dict[str, torch.Tensor], module: str = "x") -> StoredLayer | None:
    return AUTO_ROUND.describe(AUTO_ROUND.scheme(config), module, headers(tensors))


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "int4:group128:f16"),
        ({"bits": 2, "group_size": 64, "sym": False}, "int2:asym:group64:f16"),
        ({"bits": 8, "group_size": -1}, "int8:channel:f16"),
        ({"bits": 16}, "None"),
        ({"bits": 4, "act_bits": 16}, "int4:group128:f16"),
        ({"act_bits": 8, "act_data_type": "int"}, "int4:group128:f16 * int8:token:f32:dynamic"),
        ({"act_bits": 8, "act_group_size": -1, "act_sym": False}, "int4:group128:f16 * int8:asym:token:f32:dynamic"),
        ({"act_bits": 8, "act_data_type": "fp8"}, "int4:group128:f16 * e4m3:token:f32:dynamic"),
        ({"data_type": "mx_fp", "group_size": 32}, "e2m1:group32:e8m0"),
        ({"data_type": "mx_fp4", "group_size": 32, "act_bits": 16}, "e2m1:group32:e8m0"),
        (
            {"data_type": "mx_fp8e4m3", "bits": 8, "group_size": 32, "act_bits": 8, "act_group_size": 32},
            "e4m3:group32:e8m0 * e4m3:group32:e8m0:dynamic",
        ),
        ({"data_type": "nv_fp", "group_size": 16}, NVFP4),
        (
            {
                "data_type": "nv_fp",
                "group_size": 16,
                "act_bits": 4,
                "act_group_size": 16,
                "act_data_type": "nv_fp4_with_static_gs",
            },
            f"{NVFP4} * e2m1:group16:e4m3:dynamic/tensor:f32",
        ),
        ({"data_type": "fp8", "bits": 8, "group_size": [64, 32]}, "e4m3:block64x32:f32"),
        (
            {"data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8, "act_group_size": 0, "act_dynamic": False},
            "e4m3:channel:f32 * e4m3:tensor:f32",
        ),
        (
            {"data_type": "fp", "bits": 8, "group_size": [128, 128], "act_bits": 8, "act_group_size": 128},
            "e4m3:block128x128:f32 * e4m3:group128:f32:dynamic",
        ),
    ],
)
def test_settings(settings: dict[str, Any], key: str) -> None:
    assert key_of(settings) == key


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bits": "4"}, "bits of the configuration is '4'"),
        ({"bits": 9}, "9 bits"),
        ({"super_bits": 6}, "super_bits"),
        ({"data_type": "mx_int"}, "'mx_int'"),
        ({"data_type": "fp8_e5m2", "bits": 8}, "'fp8_e5m2'"),
        ({"data_type": "fp", "bits": 8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"data_type": "log"}, "'log'"),
        ({"data_type": "mx_fp"}, "groups of 128, needed 32"),
        ({"data_type": "nv_fp", "group_size": 32}, "groups of 32, needed 16"),
        ({"group_size": [128]}, r"group_size of the configuration is \[128\]"),
        ({"act_bits": 8, "act_dynamic": False}, "static scales"),
        ({"act_bits": 8, "act_data_type": "fp", "act_group_size": 0, "act_dynamic": False}, "static scales"),
        ({"rotation_config": {"type": "hadamard"}}, "rotation_config"),
        ({"packing_format": "auto_round:mlx"}, "packing_format is 'auto_round:mlx'"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "e5m3"),
        ({"extra_config": {"a": 8}}, r"extra_config\['a'\] is 8"),
        ({"block_name_to_quantize": 4}, "block_name_to_quantize is 4"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        AUTO_ROUND.scheme(config)


@pytest.mark.parametrize(
    ("config", "variant"),
    [
        ({}, "gptq/gptq"),
        ({"packing_format": "auto_round:auto_gptq"}, "gptq/gptq"),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq/gptq_v2"),
        ({"packing_format": "auto_round"}, "gptq/gptq_v2"),
        ({"packing_format": "auto_round:auto_awq"}, "awq/gemm"),
        ({"packing_format": "auto_round:fp8_static"}, "fp8/"),
        ({"packing_format": "auto_round:llm_compressor"}, "compressed-tensors/"),
        ({"backend": "auto_round:gptq:exllamav2"}, "gptq/gptq"),
        ({"backend": "auto_round:exllamav2"}, "gptq/gptq_v2"),
        ({"backend": "gptq:marlin"}, "gptq/gptq"),
    ],
)
def test_packing_formats(config: dict[str, Any], variant: str) -> None:
    assert AUTO_ROUND.scheme(config).variant == variant


# --- which modules ---------------------------------------------------------------------------------------------------


EXTRA = {
    r".*layers\.\d+\.mlp.*": {"bits": 2},
    "mlp.gate": {"bits": 16, "data_type": "float"},
    "gate": {"bits": 3},
    "model.layers.1.mlp.gate": {"bits": 8, "group_size": -1},
    "lm_head": {"bits": 8},
}


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("model.layers.1.mlp.gate", "int8:channel:f16"),  # a whole name, whatever stands before it
        ("model.layers.0.mlp.gate", "None"),  # the longest end of a name
        ("model.layers.0.gate", "int3:group64:f16"),
        ("model.layers.0.mlp.gate_proj", "int2:group64:f16"),  # no end of a name; a regular expression
        ("model.layers.0.self_attn.q_proj", "int4:group64:f16"),
        ("lm_head", "int8:group64:f16"),
    ],
)
def test_extra_config(module: str, key: str) -> None:
    """B05: ends of names are whole segments."""
    assert key_of(BASE | {"extra_config": EXTRA}, module) == key


def test_regular_expressions_are_searched_for() -> None:
    assert key_of(BASE | {"extra_config": {r"layers\.1": {"bits": 16}}}) == "None"
    assert key_of(BASE | {"extra_config": {r"^layers\.1": {"bits": 16}}}) == "int4:group64:f16"
    with pytest.raises(SchemeError, match="no regular expression"):
        key_of(BASE | {"extra_config": {"(": {"bits": 16}}})


@pytest.mark.parametrize(
    "blocks",
    ["model.layers.1, model.visual", ["model.layers.1", "model.visual"], [["model.layers.1"], ["model.visual"]]],
)
@pytest.mark.parametrize("name", ["block_name_to_quantize", "to_quant_block_names"])
def test_blocks(blocks: Any, name: str) -> None:
    modules = ("model.layers.1.fc", "model.layers.10.fc", "model.visual.fc", "lm_head", "x.model.layers.1.fc")
    found = [key_of(BASE | {name: blocks}, module) != "None" for module in modules]
    assert found == [True, False, True, False, False]


def test_without_blocks_all_but_the_head() -> None:
    assert key_of(BASE, "lm_head") == "None"
    assert key_of(BASE, "anything.fc") == "int4:group64:f16"


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_the_rule_for_zero_points_comes_from_the_packing() -> None:
    """B18: the same bytes but for the zero points, the same numbers."""
    record, numbers = layer(ASYM), []
    for packing, version in (("auto_round:auto_gptq", "gptq"), ("auto_round", "gptq_v2")):
        tensors = GPTQ.write_as(record, StoredLayer(ASYM, version))
        del tensors["g_idx"]
        stored = described(BASE | {"sym": False, "packing_format": packing}, tensors)
        assert stored == StoredLayer(ASYM, f"gptq/{version}")
        numbers.append(dequantize_record(AUTO_ROUND.read(stored, tensors, SHAPE)))
    assert torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[0], dequantize_record(record))


def test_layers_of_several_formats_in_one_file() -> None:
    """B16: the tensors of each layer say what it is."""
    config = BASE | {
        "packing_format": "auto_round:auto_awq",
        "sym": False,
        "extra_config": {
            "a": {"bits": 8},
            "b": {"data_type": "mx_fp", "group_size": 32},
            "c": {"data_type": "fp", "bits": 8, "group_size": -1, "act_bits": 8, "act_group_size": -1},
        },
    }
    eight = LinearKey.parse("int8:asym:group64:f16")
    mx = LinearKey.parse("e2m1:group32:e8m0")
    fp8 = LinearKey.parse("e4m3:channel:f32 * e4m3:token:f32:dynamic")
    cases = {
        "x": (AWQ.write(layer(ASYM), ASYM), StoredLayer(ASYM, "awq/gemm")),
        "a": (GPTQ.write_as(layer(eight), StoredLayer(eight, "gptq")), StoredLayer(eight, "gptq/gptq")),
        "b": (CT.write(layer(mx), mx), StoredLayer(mx, "compressed-tensors/mxfp4-pack-quantized")),
        "c": (AUTO_ROUND.write(layer(fp8), fp8), StoredLayer(fp8, "fp8/weight_scale")),
    }
    for module, (tensors, stored) in cases.items():
        assert described(config, tensors, module) == stored
        AUTO_ROUND.read(stored, tensors, SHAPE).validate()


def test_activations_of_integer_weights_are_in_the_configuration_alone() -> None:
    tensors = AUTO_ROUND.write(layer(SYM), SYM)
    stored = described(BASE | {"act_bits": 8, "act_data_type": "int", "act_dynamic": True}, tensors)
    assert stored is not None
    assert str(stored.key) == "int4:group64:f16 * int8:token:f32:dynamic"
    assert {spec.name for spec in AUTO_ROUND.specs(stored)} >= tensors.keys()
    assert torch.equal(
        dequantize_record(AUTO_ROUND.read(stored, tensors, SHAPE)),
        dequantize_record(AUTO_ROUND.read(StoredLayer(SYM, "gptq/gptq"), tensors, SHAPE)),
    )


def test_negative_scales_are_right() -> None:
    record = layer(SYM)
    record = record.with_tensors(scale=-record["scale"])
    tensors = AUTO_ROUND.write(record, SYM)
    back = AUTO_ROUND.read(StoredLayer(SYM, "gptq/gptq"), tensors, SHAPE)
    assert torch.equal(dequantize_record(back), dequantize_record(record))
    assert (back["scale"] <= 0).all()


def test_symmetric_layers_do_not_read_their_zero_points() -> None:
    """B21."""
    tensors = AUTO_ROUND.write(layer(SYM), SYM)
    random = {**tensors, "qzeros": torch.randint(0, 1 << 31, tensors["qzeros"].shape, dtype=torch.int32)}
    stored = described(BASE, random)
    assert stored == StoredLayer(SYM, "gptq/gptq")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers = [dequantize_record(AUTO_ROUND.read(stored, found, SHAPE)) for found in (tensors, random)]
    assert torch.equal(numbers[0], numbers[1])


def test_block_fp8_scales_are_multipliers() -> None:
    """B43: weight_scale_inv, its edge blocks partial, here in bf16."""
    key = LinearKey.parse("e4m3:block128x128:bf16 * e4m3:group128:f32:dynamic")
    record = quantize(torch.randn(130, 200), key.weight)
    tensors = {"weight": record["codes"], "weight_scale_inv": record["scale"]}
    stored = described(BLOCK_FP8 | {"act_bits": 8, "act_group_size": 128}, tensors)
    assert stored == StoredLayer(key, "fp8/weight_scale_inv")
    assert torch.equal(dequantize_record(AUTO_ROUND.read(stored, tensors, (130, 200))), dequantize_record(record))


def test_a_plain_layer_and_an_incomplete_one() -> None:
    scheme = AUTO_ROUND.scheme(BASE)
    assert AUTO_ROUND.describe(scheme, "x", {"weight": TensorHeader("BF16", SHAPE)}) is None
    for orphan in ("qzeros", "weight_scale", "weight_global_scale", "input_scale"):
        tensors = {"weight": TensorHeader("BF16", SHAPE), orphan: TensorHeader("F32", (1,))}
        with pytest.raises(CheckpointError, match=f"x stores {orphan}"):
            AUTO_ROUND.describe(scheme, "x", tensors)


def test_integers_under_an_fp8_scale_are_refused() -> None:
    tensors = AUTO_ROUND.write(layer(SYM), SYM) | {"w_bf16_to_fp8_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="x stores w_bf16_to_fp8_scale"):
        described(BASE, tensors)


def test_a_quantized_module_that_the_configuration_leaves_out() -> None:
    tensors = AUTO_ROUND.write(layer(SYM), SYM)
    assert described(BASE | {"extra_config": {"x": {"bits": 16}}}, tensors) == StoredLayer(SYM, "gptq/gptq")
    other = LinearKey.parse("int4:group32:f16")
    with pytest.raises(CheckpointError, match="leaves it out"):
        described(BASE | {"extra_config": {"x": {"bits": 16}}}, AUTO_ROUND.write(layer(other), other))


def test_quantization_config_alone(tmp_path: Path) -> None:
    """B11."""
    record = layer(SYM)
    tensors = AUTO_ROUND.write(record, SYM)
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "quantization_config.json").write_text(json.dumps(BASE | {"packing_format": "auto_round:auto_gptq"}))
    stored = StoredCheckpoint.open(tmp_path)
    assert stored.decided_by == "quantization_config.json"
    found = stored.describe("m")
    assert found == StoredLayer(SYM, "gptq/gptq")
    assert torch.equal(dequantize_record(stored.record("m", found, SHAPE)), dequantize_record(record))


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "packing", "names"),
    [
        ("int4:group64:f16", "auto_round:auto_gptq", {"qweight", "qzeros", "scales"}),
        ("int5:group64:f16", "auto_round:auto_gptq", {"qweight", "qzeros", "scales"}),
        ("int4:asym:group64:f16", "auto_round:auto_awq", {"qweight", "qzeros", "scales"}),
        ("int3:asym:group64:f16", "auto_round:gptqmodel", {"qweight", "qzeros", "scales"}),
        ("e2m1:group32:e8m0", "auto_round:llm_compressor", {"weight_packed", "weight_scale"}),
        (
            "e4m3:channel:f32 * e4m3:tensor:f32",
            "auto_round:fp8_static",
            {"weight", "weight_scale", "input_scale"},
        ),
        ("e4m3:channel:f32 * e4m3:token:f32:dynamic", "auto_round:fp8", {"weight", "weight_scale"}),
    ],
)
def test_what_each_key_is_written_as(key: str, packing: str, names: set[str]) -> None:
    """B20: no zero point is wrapped, because asymmetric layers store theirs as they are."""
    linear = LinearKey.parse(key)
    tensors = AUTO_ROUND.write(layer(linear), linear)
    assert tensors.keys() == names
    config = AUTO_ROUND.config({"a.b": linear}, ["lm_head"])
    assert config["packing_format"] == packing
    assert "extra_config" not in config


def test_keys_that_differ_are_in_extra_config() -> None:
    eight = LinearKey.parse("int8:channel:f16")
    config = AUTO_ROUND.config({"m.1.a": SYM, "m.1.b": SYM, "m.2.a": eight, "lm_head": SYM}, ["m.gate", "m.1.gate"])
    found = {name: key_of(config, name) for name in ("m.1.a", "m.2.a", "m.22.a", "lm_head", "m.gate", "m.1.gate")}
    assert found == {
        "m.1.a": str(SYM),
        "m.2.a": str(eight),
        "m.22.a": str(SYM),
        "lm_head": str(SYM),
        "m.gate": "None",
        "m.1.gate": "None",
    }


def test_layers_of_two_packings_are_refused() -> None:
    with pytest.raises(OutputError, match="one packing_format for a model"):
        AUTO_ROUND.config({"a": SYM, "b": ASYM}, [])


def test_act_order_has_no_place() -> None:
    record = layer(SYM).with_tensors(order=torch.randperm(SHAPE[1]).int() // 64)
    with pytest.raises(OutputError, match="no place for the order"):
        AUTO_ROUND.write(record, SYM)


@pytest.mark.parametrize(
    "key", ["e5m2:tensor:f32", "int4:tensor:f16", "e2m1:group16:e8m0", "int8:channel:bf16 * int8:tensor:f32"]
)
def test_refusals(key: str) -> None:
    assert "auto-round holds" in (AUTO_ROUND.refuse(LinearKey.parse(key), SHAPE) or "")


def test_cautions() -> None:
    assert AUTO_ROUND.caution(SYM, SHAPE) is None
    assert "multiples of 32" in (AUTO_ROUND.caution(SYM, (40, 64)) or "")
    assert AUTO_ROUND.refuse(KEYS["W4A16_ASYM"], (40, 128)) is not None
