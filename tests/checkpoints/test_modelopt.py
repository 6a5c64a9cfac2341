"""ModelOpt: both forms of its configuration, its rule for names, its oddities, and its golden vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fewbit.checkpoints.modelopt import ModelOpt
from fewbit.checkpoints.modelopt_config import ALGORITHMS, context_of, matches_modelopt, resolve
from fewbit.checkpoints.registry import find_format, quantization_config
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey, QuantKey
from fewbit.spec.layout import Layout
from fewbit.spec.recipe import ScaleRules
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer, same_bits
from tests.golden import floats

MODELOPT = ModelOpt()
MODULE = "model.layers.0.mlp.down_proj"
NVFP4 = "e2m1:group16:e4m3/tensor:f32"
NVFP4_ACTIVATION = "e2m1:group16:e4m3:dynamic/tensor:f32"
INT4 = LinearKey.parse("int4:group16:f32")


def nested(algorithm: Any, **more: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, **more}}


def flat(algorithm: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


def read(config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> tuple[str, QuantizedTensor]:
    stored = MODELOPT.describe(MODELOPT.scheme(config), MODULE, headers(tensors))
    assert stored is not None
    return str(stored.key), MODELOPT.read(stored, tensors, shape)


# --- configurations --------------------------------------------------------------------------------------------------

NAMES = [
    ("FP8", "e4m3:tensor:f32 * e4m3:tensor:f32"),
    ("FP8_PER_CHANNEL_PER_TOKEN", "e4m3:channel:f32 * e4m3:token:f32:dynamic"),
    ("fp8_pb_wo", "e4m3:block128x128:f32"),
    ("FP8_PB_WO", "e4m3:block128x128:f32"),
    ("NVFP4", f"{NVFP4} * {NVFP4_ACTIVATION}"),
    ("nvfp4", f"{NVFP4} * {NVFP4_ACTIVATION}"),
    ("NVFP4_AWQ", f"{NVFP4} * {NVFP4_ACTIVATION}"),
    ("W4A16_NVFP4", NVFP4),
    ("W4A8_NVFP4_FP8", f"{NVFP4} * e4m3:tensor:f32"),
    ("MXFP8", "e4m3:group32:e8m0 * e4m3:group32:e8m0:dynamic"),
    ("mxfp4", "e2m1:group32:e8m0"),
    ("W4A16_AWQ", "int4:group128:f32"),
    ("W8A16", "int8:channel:f32"),
    ("W8A8_SQ_PER_CHANNEL", "int8:channel:f32 * int8:tensor:f32"),
]


@pytest.mark.parametrize(("algorithm", "key"), NAMES)
def test_both_forms_of_every_algorithm(algorithm: str, key: str) -> None:
    """B12: the same model written both ways gives one scheme."""
    excluded = ["lm_head", "model.layers.0.mlp.gate*"]
    first = MODELOPT.scheme(nested(algorithm, exclude_modules=excluded, kv_cache_quant_algo="FP8"))
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    second = MODELOPT.scheme(flat(algorithm, ignore=excluded, kv_cache_scheme=scheme))
    assert first == second
    assert [str(rule.key) for rule in first.rules] == [key]
    assert first.ignore == tuple(excluded)
    assert str(first.kv_cache) == "e4m3:tensor:f32"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_context_of_a_key_leads_back_to_it(algorithm: str) -> None:
    resolved = resolve(algorithm, {"group_size": 64} if ALGORITHMS[algorithm].size else {}, "x")
    context = context_of(resolved.key)
    assert context is not None
    again = resolve(context.algorithm, {"group_size": context.group_size}, "x")
    assert again.key == resolved.key
    assert context.group_size == (64 if ALGORITHMS[algorithm].size else 0)


@pytest.mark.parametrize("size", [None, 0, 64])
def test_group_sizes(size: int | None) -> None:
    """B32: unset and zero are the default, no error."""
    (rule,) = MODELOPT.scheme(nested("W4A16_AWQ", group_size=size)).rules
    assert str(rule.key) == f"int4:group{size or 128}:f32"


def test_config_groups_without_activations_are_weight_only() -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}}
    (rule,) = MODELOPT.scheme(flat("NVFP4", config_groups=groups)).rules
    assert str(rule.key) == NVFP4


def test_only_the_cache_may_be_quantized() -> None:
    scheme = MODELOPT.scheme(nested(None, kv_cache_quant_algo="FP8"))
    assert not scheme.rules
    assert scheme.kv_cache is not None
    assert MODELOPT.describe(scheme, MODULE, headers({"weight": torch.zeros(4, 4)})) is None


def test_an_unknown_cache_is_said_and_left() -> None:
    with pytest.warns(UserWarning, match="'INT9'"):
        assert MODELOPT.scheme(nested("FP8", kv_cache_quant_algo="INT9")).kv_cache is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (nested("FP9"), "'FP9'; known are FP8, .*MIXED_PRECISION.* Did you mean"),
        (nested(8), "quant_algo 8"),
        (nested("NVFP4_SVD"), "NVFP4_SVD.*low-rank"),
        (nested("W4A8_AWQ"), "W4A8_AWQ.*rounds"),
        ({"quant_method": "modelopt"}, "names no quant_algo"),
        ({"quantization": "FP8"}, "names no quant_algo"),
        (nested("W4A16_AWQ", group_size="128"), "group_size '128'"),
        (nested("W4A16_AWQ", group_size=-1), "group_size -1"),
        (nested("FP8", exclude_modules="lm_head"), "exclude_modules is 'lm_head'"),
        (nested("FP8", kv_cache_quant_algo=8), "kv_cache_quant_algo is 8"),
        (nested("MIXED_PRECISION"), "quantized_layers None"),
        (nested("MIXED_PRECISION", quantized_layers={"x": "FP8"}), "quantized_layers.x is 'FP8'"),
        (nested("MIXED_PRECISION", quantized_layers={"x": {"quant_algo": "FP7"}}), "quantized_layers.x has .*'FP7'"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        MODELOPT.scheme(config)


def checkpoint(path: Path, flat_config: dict[str, Any] | None, nested_config: dict[str, Any] | None) -> TensorFolder:
    save_file({"norm.weight": torch.ones(2)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": flat_config} if flat_config else {}))
    if nested_config:
        (path / "hf_quant_config.json").write_text(json.dumps(nested_config))
    return TensorFolder(path)


def test_the_side_file_alone_is_enough(tmp_path: Path) -> None:
    """B11: a checkpoint that only hf_quant_config.json describes is not read as a plain one."""
    found = quantization_config(checkpoint(tmp_path, None, nested("FP8")))
    assert found is not None
    assert found[1] == "hf_quant_config.json"
    assert isinstance(find_format(found[0]), ModelOpt)
    assert str(MODELOPT.scheme(found[0]).rules[0].key) == NAMES[0][1]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (flat("FP8"), nested("NVFP4"), "quant_algo is 'fp8' and hf_quant_config.json says 'nvfp4'"),
        (flat("NVFP4", group_size=16), nested("NVFP4", group_size=32), "group_size is 16 .* 32"),
        (flat("FP8", ignore=["a"]), nested("FP8", exclude_modules=["b"]), r"exclude_modules is \['a'\] .*\['b'\]"),
    ],
)
def test_forms_that_disagree(first: dict[str, Any], second: dict[str, Any], words: str, tmp_path: Path) -> None:
    """B12: a contradiction is an error with both values."""
    with pytest.raises(CheckpointError, match=words):
        quantization_config(checkpoint(tmp_path, first, second))


def test_forms_that_agree(tmp_path: Path) -> None:
    first = flat("fp8_pb_wo", ignore=["lm_head", "model.embed_tokens"])
    second = nested("FP8_PB_WO", exclude_modules=["model.embed_tokens", "lm_head"], kv_cache_quant_algo=None)
    assert quantization_config(checkpoint(tmp_path, first, second)) == (first, "config.json: quantization_config")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0*", "model.layers.0", True),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.*", "model.layers.0", True),
        ("model.layers.0.*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.0.*", "model.layers.01", False),
        ("*mlp.gate", "model.layers.3.mlp.gate", True),
        ("*mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("b_proj", "x.b_proj", True),
        ("b_proj", "x.kv_b_proj", False),
        ("re:.*gate", "model.layers.3.mlp.gate", True),
        ("model.language_model.layers.0.mlp", "language_model.model.layers.0.mlp", True),
        ("language_model.model.layers.0.mlp", "model.language_model.layers.0.mlp.up_proj", True),
        ("language_model.model.layers.*mlp", "model.language_model.layers.7.mlp", True),
        ("language_model.lm_head", "lm_head", True),
        ("model.layers.0.mlp", "model.visual.layers.0.mlp", False),
        ("model.*", "lm_head", False),
        ("model.layers.1", "model.layers.11", False),
    ],
)
def test_names(pattern: str, name: str, matched: bool) -> None:
    """B05 and B10: whole segments, globs and expressions, and wrappers in either order; `X*` means `X` too."""
    assert matches_modelopt(pattern, name) is matched


def test_mixed_precision_prefers_the_longer_name() -> None:
    scheme = MODELOPT.scheme(
        nested(
            "MIXED_PRECISION",
            exclude_modules=["lm_head"],
            quantized_layers={
                "model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
                "model.layers.0.self_attn.*": {"quant_algo": "W4A16_AWQ", "group_size": 64},
            },
        )
    )
    keys = {
        name: str(scheme.key_for(f"model.layers.0.{name}", "Linear", MODELOPT.matcher))
        for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "other")
    }
    assert keys == {
        "mlp.up_proj": NAMES[4][1],
        "mlp.down_proj": NAMES[0][1],
        "self_attn.q_proj": "int4:group64:f32",
        "other": "None",
    }


def test_mixed_precision_is_written_by_names() -> None:
    layers = {"a": KEYS["FP8"], "b": KEYS["NVFP4"], "c": KEYS["W4A16"]}
    config = MODELOPT.config(layers, ["lm_head"])
    assert config["quantized_layers"]["c"] == {"quant_algo": "W4A16_AWQ", "group_size": 128}
    scheme = MODELOPT.scheme(config)
    assert all(str(scheme.key_for(name)).split(":")[0] == str(key).split(":")[0] for name, key in layers.items())
    assert scheme.key_for("d") is None
    with pytest.raises(OutputError, match="no algorithm for int3"):
        MODELOPT.config({"a": LinearKey.parse("int3:channel:f32")}, [])


# --- oddities --------------------------------------------------------------------------------------------------------


def test_int4_packs_pairs_of_rows(golden: dict[str, Any]) -> None:
    vector = golden["modelopt_int4_awq"]
    tensors = {
        "weight": torch.tensor(vector["weight_uint8_outhalf_in"], dtype=torch.uint8),
        "weight_scale": floats(vector["weight_scale_out_groups"]),
    }
    config = flat("W4A16_AWQ")  # without a group size, as ModelOpt writes it: the tensors give it
    key, record = read(config, tensors, (4, 32))
    assert key == "int4:group16:f32"
    assert record.layout == Layout("dense", 4, "N", 8)
    assert torch.equal(dequantize_record(record), floats(vector["dequant_out_in"]))
    assert all(same_bits(MODELOPT.write(record, INT4)[name], tensor) for name, tensor in tensors.items())


def test_scales_of_blocks_have_four_axes_or_two() -> None:
    key = KEYS["e4m3:block64x32:f32"]
    assert MODELOPT.refuse(key, SHAPE) is not None  # another block has no name
    weight = torch.randn(130, 256)
    key = LinearKey.parse("e4m3:block128x128:f32")
    tensors = MODELOPT.write(quantize(weight, key.weight), key)
    assert tensors["weight_scale"].shape == (2, 1, 2, 1)
    _, four = read(flat("fp8_pb_wo"), tensors, (130, 256))
    tensors["weight_scale"] = tensors["weight_scale"].reshape(2, 2)
    _, two = read(flat("FP8_PB_WO"), tensors, (130, 256))
    assert torch.equal(dequantize_record(four), dequantize_record(two))
    stored = MODELOPT.describe(MODELOPT.scheme(flat("FP8_PB_WO")), MODULE, headers(tensors))
    assert stored is not None
    assert {spec.name: len(spec.shape) for spec in MODELOPT.specs(stored)}["weight_scale"] == 2


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_AWQ", "NVFP4", "W8A8_SQ_PER_CHANNEL"])
def test_a_pre_scale_is_read_whatever_the_algorithm_is_called(algorithm: str) -> None:
    resolved = resolve(algorithm, {}, "x")
    tensors = MODELOPT.write(layer(resolved.key), resolved.key)
    tensors["pre_quant_scale"] = torch.rand(SHAPE[1]).bfloat16()
    _, record = read(flat(algorithm), tensors, SHAPE)
    assert same_bits(record["pre_scale"], tensors["pre_quant_scale"])
    if algorithm in ("W4A16_AWQ", "W8A8_SQ_PER_CHANNEL"):
        again = MODELOPT.write(record, resolved.key)
        assert same_bits(again["pre_quant_scale"], tensors["pre_quant_scale"])
    else:  # the configuration would say NVFP4, whose readers look for no pre_quant_scale
        with pytest.raises(OutputError, match="pre_scale comes before"):
            MODELOPT.write(record, resolved.key)


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_without_an_input_scale_a_layer_is_weight_only(name: str) -> None:
    tensors = MODELOPT.write(layer(KEYS[name]), KEYS[name])
    del tensors["input_scale"]
    with pytest.warns(UserWarning, match=f"{MODULE} .*no input_scale; it is read as weight-only"):
        key, _ = read(flat(name), tensors, SHAPE)
    assert "*" not in key


def test_weight_only_layers_leave_an_input_scale_alone() -> None:
    tensors = MODELOPT.write(layer(KEYS["NVFP4"]), KEYS["NVFP4"])
    _, record = read(flat("W4A16_NVFP4"), tensors, SHAPE)
    assert "input_scale" not in record
    assert "input_global_scale" not in record


def test_scales_of_the_cache_belong_to_no_layer() -> None:
    tensors = MODELOPT.write(layer(KEYS["FP8"]), KEYS["FP8"]) | {"k_scale": torch.tensor(0.5)}
    _, record = read(flat("FP8"), tensors, SHAPE)
    assert set(record.tensors) == {"codes", "scale", "input_scale"}
    plain = {"weight": torch.zeros(4, 4), "k_scale": torch.tensor(0.5)}
    assert MODELOPT.describe(MODELOPT.scheme(flat("FP8")), MODULE, headers(plain)) is None


def test_low_rank_products_are_refused() -> None:
    tensors = MODELOPT.write(layer(KEYS["NVFP4"]), KEYS["NVFP4"]) | {"svdquant_lora_a": torch.zeros(4, SHAPE[1])}
    with pytest.raises(CheckpointError, match="svdquant_lora_a"):
        read(flat("NVFP4"), tensors, SHAPE)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weight_scale_2", "input_scale"])
def test_second_level_scales_that_multiply_by_nothing(name: str, value: float) -> None:
    tensors = MODELOPT.write(layer(KEYS["NVFP4"]), KEYS["NVFP4"])
    with pytest.raises(CheckpointError, match=f"{name} is .*needed a positive multiplier"):
        read(flat("NVFP4"), {**tensors, name: torch.tensor(value)}, SHAPE)


def test_multiplier_and_divisor_mean_one_number() -> None:
    """B37: the same weights from ModelOpt's multiplier and from compressed-tensors' divisor."""
    key = KEYS["NVFP4"]
    record = quantize(torch.randn(SHAPE), key.weight).with_tensors(input_global_scale=torch.tensor(0.01).double())
    tensors = MODELOPT.write(record, key)
    _, back = read(flat("NVFP4"), tensors, SHAPE)
    assert torch.equal(tensors["weight_scale_2"].reshape(()), record["global_scale"].float().reshape(()))
    torch.testing.assert_close(dequantize_record(back), dequantize_record(record), rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("int4:group32:f32", (7, 64), "N=7"),
        ("int4:group32:f32", (8, 40), "K=40"),
        (NVFP4, (8, 40), "K=40"),
        ("int4:channel:f32", SHAPE, "no algorithm"),
        ("int4:asym:group32:f32", SHAPE, "no algorithm"),
        ("e4m3:tensor:f32", SHAPE, "no algorithm"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], words: str) -> None:
    assert words in (MODELOPT.refuse(LinearKey.parse(key), shape) or "")


# --- golden vectors --------------------------------------------------------------------------------------------------


def test_golden_nvfp4(golden: dict[str, Any]) -> None:
    vector = golden["modelopt_nvfp4"]
    tensors = {
        "weight": torch.tensor(vector["weight_uint8"], dtype=torch.uint8),
        "weight_scale": torch.tensor(vector["weight_scale_e4m3_bytes"], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(vector["weight_scale_2"]),
    }
    _, record = read(flat("W4A16_NVFP4"), tensors, (2, 32))
    assert torch.equal(dequantize_record(record) + 0.0, floats(vector["dequant_out_in"]) + 0.0)
    key = LinearKey.parse(NVFP4)
    weight = floats(vector["weight_out_in"]) + 0.0  # ModelOpt's cast forgets the sign of -0.0, fewbit keeps it
    written = MODELOPT.write(quantize(weight, key.weight), key)
    assert all(same_bits(written[name].reshape(tensor.shape), tensor) for name, tensor in tensors.items())


def test_golden_mxfp8(golden: dict[str, Any]) -> None:
    vector = golden["modelopt_mxfp8"]
    tensors = {
        "weight": torch.tensor(vector["weight_e4m3_bytes"], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale": torch.tensor(vector["weight_scale_e8m0"], dtype=torch.uint8),
    }
    _, record = read(flat("MXFP8"), tensors, (2, 64))
    assert torch.equal(dequantize_record(record), floats(vector["dequant_out_in"]))
    key = KEYS["MXFP8"]
    numbers = quantize(floats(vector["weight_out_in"]), key.weight, ScaleRules(mx="ceil"))
    assert all(same_bits(MODELOPT.write(numbers, key)[name], tensor) for name, tensor in tensors.items())


def test_golden_mxfp4(golden: dict[str, Any]) -> None:
    """Its writer rounds ties toward zero, so the bytes are written from the numbers they stand for."""
    vector = golden["modelopt_mxfp4"]
    tensors = {
        "weight": torch.tensor(vector["weight_uint8"], dtype=torch.uint8),
        "weight_scale": torch.tensor(vector["weight_scale_e8m0"], dtype=torch.uint8),
    }
    _, record = read(flat("mxfp4"), tensors, (2, 64))
    numbers = dequantize_record(record)
    assert torch.equal(numbers, floats(vector["dequant_out_in"]))
    key = LinearKey(QuantKey.parse("e2m1:group32:e8m0"))
    assert all(same_bits(MODELOPT.write(record, key)[name], tensor) for name, tensor in tensors.items())
    ours = quantize(floats(vector["weight_out_in"]), key.weight, ScaleRules(mx="ceil"))
    assert same_bits(MODELOPT.write(ours, key)["weight_scale"], tensors["weight_scale"])
