"""compressed-tensors: what configurations mean, what is written, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.checkpoints.compressed_tensors_config import SparsityRemovedError
from fewbit.errors import CheckpointError, FewbitError, OutputError
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, SHAPE

CT = CompressedTensors()
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def config(weights: Any = INT4, activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


def only_key(written: dict[str, Any]) -> LinearKey:
    (rule,) = CT.scheme(written).rules
    return rule.key


# --- what arguments mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ({"num_bits": 4, "group_size": 64}, "int4:group64:bf16"),
        ({"num_bits": 4, "group_size": -1}, "int4:channel:bf16"),
        ({"num_bits": 4, "strategy": "group", "group_size": -1}, "int4:channel:bf16"),
        ({"num_bits": 4, "strategy": "group", "group_size": None}, "int4:channel:bf16"),
        ({}, "int8:tensor:bf16"),
        ({"num_bits": 3, "strategy": "CHANNEL", "symmetric": False}, "int3:asym:channel:bf16"),
        (
            {"num_bits": 4, "group_size": 64, "actorder": "weight", "observer": "mse", "observer_kwargs": {}},
            "int4:group64:bf16",
        ),
        ({"num_bits": 4, "group_size": 64, "actorder": "group"}, "int4:group64:bf16"),
        ({"num_bits": 8, "type": "FLOAT", "strategy": "block", "block_structure": "128x64"}, "e4m3:block128x64:bf16"),
        (
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
            "e4m3:block128x128:bf16",
        ),
        ({"num_bits": 8, "type": "float", "scale_dtype": "torch.float32"}, "e4m3:tensor:f32"),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "e2m1:group16:e4m3/tensor:f32",
        ),
        ({"num_bits": 4, "type": "float", "group_size": 32}, "e2m1:group32:e8m0"),
        ({"num_bits": 6, "type": "float", "group_size": 32}, "e2m3:group32:e8m0"),
        ({"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}, "e4m3:group32:e8m0"),
    ],
)
def test_arguments(weights: dict[str, Any], key: str) -> None:
    assert str(only_key(config(weights))) == key


@pytest.mark.parametrize(
    ("activations", "key"),
    [
        ({"strategy": "token", "dynamic": True}, "int8:token:f32:dynamic"),
        ({"type": "float"}, "e4m3:tensor:f32"),
        ({"type": "float", "group_size": 128, "dynamic": True}, "e4m3:group128:f32:dynamic"),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            "e2m1:group16:e4m3:dynamic/tensor:f32",
        ),
    ],
)
def test_activations(activations: dict[str, Any], key: str) -> None:
    assert str(only_key(config(activations=activations)).activation) == key


def test_presets_by_name() -> None:
    groups = {"W4A16": ["Linear"], "fp8_dynamic": ["re:.*down_proj"], "UNQUANTIZED": ["re:.*gate"]}
    scheme = CT.scheme({"config_groups": groups})
    assert scheme.key_for("mlp.up_proj", "Linear", CT.matcher) == KEYS["W4A16"]
    assert scheme.key_for("mlp.down_proj", "Linear", CT.matcher) == KEYS["FP8_DYNAMIC"]


@pytest.mark.peer
def test_the_library_presets_are_all_known() -> None:
    peer = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    for name, arguments in peer.PRESET_SCHEMES.items():
        if not arguments:
            continue
        scheme = peer.preset_name_to_scheme(name, ["Linear"]).model_dump()
        described = only_key({"config_groups": {"group_0": scheme}})
        assert only_key({"config_groups": {name: ["Linear"]}}) == described, name


def test_exact_names_beat_expressions_and_expressions_beat_classes() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*proj"], "weights": FP8},
        "c": {"targets": ["x.down_proj"], "weights": {"num_bits": 8}},
    }
    scheme = CT.scheme({"config_groups": groups, "ignore": ["lm_head", "re:.*vision"]})
    found = {
        name: str(scheme.key_for(name, "Linear", CT.matcher))
        for name in ("x.down_proj", "x.up_proj", "x.other", "lm_head", "x.vision.up_proj")
    }
    assert found == {
        "x.down_proj": "int8:tensor:bf16",
        "x.up_proj": "e4m3:channel:bf16",
        "x.other": "int4:group128:bf16",
        "lm_head": "None",
        "x.vision.up_proj": "None",
    }


def test_attention_groups_and_the_kv_cache() -> None:
    written = config(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"})
    written["config_groups"]["kv"] = {"targets": ["LlamaAttention"], "input_activations": {"type": "float"}}
    scheme = CT.scheme(written)
    assert len(scheme.rules) == 1
    assert str(scheme.kv_cache) == "e4m3:tensor:f32"


@pytest.mark.parametrize("key", [key for key in KEYS if CT.refuse(KEYS[key], SHAPE) is None])
def test_written_configurations_say_the_key(key: str) -> None:
    described = only_key(CT.config({"x": KEYS[key]}, ["lm_head"]))
    element = KEYS[key].weight.scale.element
    assert described.weight.with_scale_element(element) == KEYS[key].weight
    assert described.activation == KEYS[key].activation


def test_several_keys_are_written_by_name() -> None:
    layers = {"a.q": KEYS["W4A16"], "a.k": KEYS["FP8_DYNAMIC"], "b.q": KEYS["W4A16"]}
    written = CT.config(layers, ["a.o", "lm_head"])
    assert written["format"] == "mixed-precision"
    assert written["ignore"] == ["a.o", "lm_head"]
    groups = {tuple(group["targets"]): group["format"] for group in written["config_groups"].values()}
    assert groups == {("a.q", "b.q"): "pack-quantized", ("a.k",): "float-quantized"}
    scheme = CT.scheme(written)
    assert {name: scheme.key_for(name, "Linear", CT.matcher) for name in layers} == layers
    with pytest.raises(OutputError, match="e5m2"):
        CT.config({"x": LinearKey.parse("e5m2:tensor:f32")}, [])


# --- what is refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"sparsity_config": {"format": "sparse-24-bitmask", "targets": []}},
        {"sparsity_config": {"format": "dense", "targets": ["Linear"]}},
        {"sparsity_config": {"targets": ["Linear"]}},
        {"format": "marlin-24"},
        {"format": "sparse-bitmask"},
    ],
)
def test_sparsity(more: dict[str, Any]) -> None:
    """An error of fewbit's, which code that waits for the library's DeprecationWarning catches too."""
    with pytest.raises(SparsityRemovedError, match=r"sparse .*compressed-tensors has removed sparsity.*Use") as caught:
        CT.scheme(config(**more))
    assert isinstance(caught.value, FewbitError) and isinstance(caught.value, DeprecationWarning)


@pytest.mark.parametrize("more", [{}, {"sparsity_config": {}}, {"sparsity_config": {"format": "dense", "targets": []}}])
def test_no_sparsity(more: dict[str, Any]) -> None:
    assert CT.scheme(config(**more)).rules


def test_a_sparse_group() -> None:
    written = config()
    written["config_groups"]["group_0"]["format"] = "marlin-24"
    with pytest.raises(SparsityRemovedError, match="marlin-24"):
        CT.scheme(written)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (config({**INT4, "num_bits": 1}), "1 bits"),
        (config({**INT4, "num_bits": "4"}), "num_bits is '4'"),
        (config({**INT4, "type": "complex"}), "'complex'"),
        (config({"num_bits": 5, "type": "float"}), "5-bit"),
        (config({**INT4, "group_size": -7}), "group_size -7"),
        (config({**INT4, "group_size": "big"}), "group_size is 'big'"),
        (config({"strategy": "attn_head"}), "attn_head"),
        (config({"strategy": "tensor_group"}), "tensor_group"),
        (config({"strategy": "block"}), "block_structure is None"),
        (config({"strategy": "block", "block_structure": "0x1"}), "block_structure is '0x1'"),
        (config({**INT4, "dynamic": "sometimes"}), "'sometimes'"),
        (config({**INT4, "symmetric": "yes"}), "symmetric is 'yes'"),
        (config({**INT4, "scale_dtype": "torch.int4"}), "scale_dtype"),
        (config({**INT4, "num_bit": 4}), "unknown argument 'num_bit'.*Did you mean 'num_bits'"),
        (config([4]), "weights is"),
        (config(None), "no weights"),
        (config(format="nvfp4-e5m3-pack-quantized"), "nvfp4-e5m3-pack-quantized"),
        (config(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config"),
        (config(ignore="lm_head"), "ignore is 'lm_head'"),
        (config(kv_cache_scheme={"strategy": "channel"}), "kv_cache_scheme has strategy .channel.*tensor, attn_head"),
        (config(sparsity_config="2:4"), "sparsity_config is"),
        ({"config_groups": {"W4A17": ["Linear"]}}, "'W4A17'.*Did you mean"),
        ({"config_groups": [INT4]}, "config_groups is"),
        ({"config_groups": {"g": {"targets": "Linear", "weights": INT4}}}, "targets is 'Linear'"),
        ({"config_groups": {"g": {"targets": [4], "weights": INT4}}}, "targets is 4"),
        (
            {"config_groups": {"g": {"targets": ["k_proj"], "weights": INT4, "output_activations": FP8}}},
            "output_activations",
        ),
    ],
)
def test_what_is_not_supported_is_named(written: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        CT.scheme(written)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(data=st.data())
def test_no_configuration_crashes(data: st.DataObject) -> None:
    written = config(dict(INT4), dict(FP8), ignore=["a"], kv_cache_scheme=dict(FP8), format="pack-quantized")
    group = written["config_groups"]["group_0"]
    target = data.draw(st.sampled_from([written, group, group["weights"], written["kv_cache_scheme"]]))
    known = [*target, "sparsity_config", "transform_config", "block_structure", "dynamic", "scale_dtype"]
    target[data.draw(st.sampled_from(known))] = data.draw(JSON)
    try:
        CT.scheme(written)
    except CheckpointError as error:
        assert error.hint
