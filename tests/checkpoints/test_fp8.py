"""Native FP8: its configurations, its rule for excluded modules, and its several names for one thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.checkpoints.fp8 import Fp8, matches_transformers
from fewbit.errors import CheckpointError, OutputError, SchemeError
from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer

FP8 = Fp8()
TENSOR_STATIC = "e4m3:tensor:f32 * e4m3:tensor:f32"
TENSOR_DYNAMIC = "e4m3:tensor:f32 * e4m3:token:f32:dynamic"
BLOCK = "e4m3:block64x64:f32 * e4m3:group64:f32:dynamic"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, TENSOR_DYNAMIC),
        ({"activation_scheme": "static"}, TENSOR_STATIC),
        ({"activation_scheme": "dynamic", "weight_block_size": None}, TENSOR_DYNAMIC),
        ({"weight_block_size": [64, 64]}, BLOCK),
        ({"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "e4m3:block128x128:e8m0 * e4m3:group128:f32:dynamic"),
        ({"weight_block_size": [64, 64], "activation_scheme": "static"}, "e4m3:block64x64:f32 * e4m3:tensor:f32"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "e4m3:channel:f32 * e4m3:token:f32:dynamic"),
    ],
)
def test_configurations(config: dict[str, Any], key: str) -> None:
    (rule,) = FP8.scheme({"quant_method": "fp8", **config}).rules
    assert str(rule.key) == key


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation_scheme": "sometimes"}, "'sometimes'"),
        ({"weight_block_size": 128}, "weight_block_size is 128"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [128, True]}, "weight_block_size"),
        ({"weight_block_size": [64, 64], "scale_fmt": "e5m3"}, "e5m3"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({"ignored_layers": "lm_head"}, "lm_head"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        FP8.scheme({"quant_method": "fp8", **config})


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_excluded_modules(name: str) -> None:
    scheme = FP8.scheme({"quant_method": "fp8", name: ["lm_head", "model.layers.1"]})
    plain = [
        module
        for module in ("lm_head", "model.layers.1.mlp.up", "model.layers.11.mlp.up", "model.layers.0.mlp.up")
        if scheme.key_for(module, "Linear", FP8.matcher) is None
    ]
    assert plain == ["lm_head", "model.layers.1.mlp.up"]


PATTERNS = [
    "lm_head",
    "layers.1",
    "mlp.gate",
    "model.layers.1",
    r"model\.layers\.\d+\.mlp",
    "fc1",
    "a|b.c",
    "model.layers.*",
    "gate",
]
SEGMENTS = ["model", "layers", "1", "11", "mlp", "gate", "gate_proj", "fc1", "lm_head", "a", "b", "c"]


@pytest.mark.peer
@given(pattern=st.sampled_from(PATTERNS), segments=st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=5))
def test_the_rule_is_that_of_transformers(pattern: str, segments: list[str]) -> None:
    peer = pytest.importorskip("transformers.quantizers.quantizers_utils")
    name = ".".join(segments)
    assert matches_transformers(pattern, name) is not peer.should_convert_module(name, [pattern])


def test_a_pattern_that_does_not_compile() -> None:
    with pytest.raises(SchemeError, match="no regular expression"):
        matches_transformers("layers.(", "model.layers.1")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("input_scale", ["input_scale", "activation_scale"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_static_scales_under_every_name(scale: str, input_scale: str, shape: tuple[int, ...]) -> None:
    key = KEYS[TENSOR_STATIC]
    record = layer(key)
    written = FP8.write(record, key)
    tensors = {
        "weight": written["weight"],
        scale: written["weight_scale"].reshape(shape),
        input_scale: written["input_scale"].reshape(shape),
    }
    stored = FP8.describe(FP8.scheme({"activation_scheme": "static"}), "x", headers(tensors))
    assert stored is not None
    assert stored.key == key
    back = FP8.read(stored, tensors, SHAPE)
    assert torch.equal(dequantize_record(back), dequantize_record(record))
    assert back["input_scale"].shape == ()
    assert torch.equal(back["input_scale"], record["input_scale"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_scales_in_either_float(dtype: torch.dtype) -> None:
    key = KEYS[BLOCK]
    tensors = FP8.write(layer(key), key)
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].to(dtype)
    stored = FP8.describe(FP8.scheme({"weight_block_size": [64, 64]}), "x", headers(tensors))
    assert stored is not None
    assert FP8.read(stored, tensors, SHAPE)["scale"].dtype == dtype


def test_edge_blocks_are_partial() -> None:
    shape, weight = (130, 200), torch.randn(130, 200)
    key = LinearKey.parse("e4m3:block128x128:f32 * e4m3:group128:f32:dynamic")
    tensors = FP8.write(quantize(weight, key.weight), key)
    assert tensors["weight_scale_inv"].shape == (2, 2)
    stored = FP8.describe(FP8.scheme({"weight_block_size": [128, 128]}), "x", headers(tensors))
    assert stored is not None
    numbers = dequantize_record(FP8.read(stored, tensors, shape))
    for row in (0, 127, 128, 129):
        for column in (0, 127, 128, 199):
            scale = tensors["weight_scale_inv"][row // 128, column // 128]
            assert numbers[row, column] == tensors["weight"][row, column].float() * scale


def test_an_embedding_that_is_converted() -> None:
    key = KEYS[TENSOR_DYNAMIC]
    tensors = FP8.write(layer(key), key)
    stored = FP8.describe(FP8.scheme({"modules_to_convert": ["embed"]}), "embed", headers(tensors), "Embedding")
    assert stored is not None
    assert stored.key.weight == key.weight


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn)}, "weight_scale is missing"),
        ({"weight": torch.zeros(SHAPE, dtype=torch.float8_e5m2), "weight_scale": torch.ones(1)}, "weight is F8_E5M2"),
        ({"weight": torch.zeros(SHAPE), "weight_scale_inv": torch.ones(2, 2)}, "weight is plain F32"),
        ({"weight_scale_inv": torch.ones(2, 2)}, "it has no weight"),
        (
            {"weight": torch.zeros(SHAPE, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 2)},
            r"shape \[3, 2\]",
        ),
    ],
)
def test_contradictions(tensors: dict[str, torch.Tensor], words: str) -> None:
    scheme = FP8.scheme({"weight_block_size": [128, 128]} if "weight_scale_inv" in tensors else {})
    with pytest.raises(CheckpointError, match=f"x .*{words}"):
        FP8.describe(scheme, "x", headers(tensors))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_one_key_for_the_whole_model() -> None:
    assert FP8.config({"a": KEYS[BLOCK], "b": KEYS[BLOCK]}, ["lm_head"])["modules_to_not_convert"] == ["lm_head"]
    with pytest.raises(OutputError, match="one key for the whole model, found 2"):
        FP8.config({"a": KEYS[BLOCK], "b": KEYS[TENSOR_STATIC]}, [])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("int8:channel:f32", "int8"),
        ("e5m2:tensor:f32", "e5m2"),
        ("e4m3:group32:e8m0", "group32"),
        ("e4m3:channel:e8m0 * e4m3:token:f32:dynamic", "e8m0"),
        ("e4m3:tensor:f32", "found None"),
        ("e4m3:block64x64:f32 * e4m3:tensor:f32", "imply activations of e4m3:group64"),
        ("e4m3:channel:f32 * e4m3:tensor:f32", "e4m3:token:f32:dynamic"),
    ],
)
def test_refusals(key: str, words: str) -> None:
    assert words in (FP8.refuse(LinearKey.parse(key), SHAPE) or "")
