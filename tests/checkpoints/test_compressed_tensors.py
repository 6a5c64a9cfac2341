"""compressed-tensors: where tensors overrule the configuration, what old versions wrote, and what is not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.checkpoints.interface import StoredLayer
from fewbit.errors import CheckpointError, OutputError
from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer

CT = CompressedTensors()


# --- tensors overrule the configuration ------------------------------------------------------------------------------


def stored_layer(actual: str, configured: str) -> StoredLayer | None:
    """What a layer of one key is said to be under the configuration of another."""
    tensors = CT.write(layer(KEYS[actual]), KEYS[actual])
    return CT.describe(CT.scheme(CT.config({"x": KEYS[configured]}, [])), "x", headers(tensors))


@pytest.mark.parametrize(
    ("actual", "configured"),
    [
        ("W8A16", "int8:tensor:f32"),
        ("int8:group32:f32", "int4:group32:f32"),
        ("e4m3:channel:bf16", "e4m3:tensor:f32"),
        ("e4m3:tensor:f32", "e4m3:channel:bf16"),
    ],
)
def test_bits_scales_and_granularity_come_from_the_tensors(actual: str, configured: str) -> None:
    stored = stored_layer(actual, configured)
    assert stored is not None
    assert stored.key == KEYS[actual]


@pytest.mark.parametrize(
    ("actual", "configured", "words"),
    [
        ("FP8_DYNAMIC", "W4A16", "weight_packed is missing"),
        ("W4A16", "FP8_DYNAMIC", "weight is missing"),
        ("MXFP4A16", "NVFP4A16", "should be e2m1:group16"),
        ("int4:group32:f32", "W4A16", r"weight_scale has shape \[256, 8\], needed \[256, 2\]"),
        ("W4A16", "W4A16_ASYM", "weight_zero_point is missing"),
        ("FP8_DYNAMIC", "FP8", "static activation scales.*input_scale is missing"),
        ("NVFP4A16", "NVFP4", "input_global_scale is missing"),
    ],
)
def test_contradictions(actual: str, configured: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=f"x .*{words}"):
        stored_layer(actual, configured)


def test_a_key_of_another_group_may_be_what_the_tensors_are() -> None:
    scheme = CT.scheme(CT.config({"a": KEYS["W4A16"], "b": KEYS["FP8_DYNAMIC"]}, []))
    tensors = CT.write(layer(KEYS["FP8_DYNAMIC"]), KEYS["FP8_DYNAMIC"])
    for module in ("a", "nobody"):
        assert CT.describe(scheme, module, headers(tensors)) == StoredLayer(KEYS["FP8_DYNAMIC"], "float-quantized")


def test_a_quantized_module_that_is_ignored() -> None:
    scheme = CT.scheme(CT.config({"a": KEYS["W4A16"]}, ["x"]))
    fitting = CT.write(layer(KEYS["W4A16"]), KEYS["W4A16"])
    assert CT.describe(scheme, "x", headers(fitting)) == StoredLayer(KEYS["W4A16"], "pack-quantized")
    other = CT.write(layer(KEYS["MXFP4A16"]), KEYS["MXFP4A16"])
    with pytest.raises(CheckpointError, match=r"x is stored quantized.*leaves it out"):
        CT.describe(scheme, "x", headers(other))


def test_a_layer_saved_before_compression() -> None:
    tensors = {"weight": torch.ones(SHAPE, dtype=torch.bfloat16), "weight_scale": torch.ones(256, 2)}
    with pytest.raises(CheckpointError, match="weight is plain BF16"):
        CT.describe(CT.scheme(CT.config({"x": KEYS["W4A16"]}, [])), "x", headers(tensors))


def test_zero_points_of_a_symmetric_layer_are_not_read() -> None:
    key = KEYS["W8A8"]
    tensors = CT.write(layer(key), key)
    stored = CT.describe(CT.scheme(CT.config({"x": key}, [])), "x", headers(tensors))
    assert stored is not None
    stale = {**tensors, "weight_zero_point": torch.randint(-9, 9, (256, 1), dtype=torch.int8)}
    assert CT.describe(CT.scheme(CT.config({"x": key}, [])), "x", headers(stale)) == stored
    plain, with_stale = (dequantize_record(CT.read(stored, found, SHAPE)) for found in (tensors, stale))
    assert torch.equal(plain, with_stale)


def test_scales_of_any_rank() -> None:
    for key, shapes in (("FP8", [(), (1,), (1, 1)]), ("FP8_DYNAMIC", [(256,), (256, 1)])):
        tensors = CT.write(layer(KEYS[key]), KEYS[key])
        stored = CT.describe(CT.scheme(CT.config({"x": KEYS[key]}, [])), "x", headers(tensors))
        assert stored is not None
        for shape in shapes:
            reshaped = {**tensors, "weight_scale": tensors["weight_scale"].reshape(shape)}
            assert CT.describe(CT.scheme(CT.config({"x": KEYS[key]}, [])), "x", headers(reshaped)) == stored
            CT.read(stored, reshaped, SHAPE).validate()


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_with_gaps_of_old_versions(bits: int) -> None:
    """Without a check, 4 codes of 7 bits a word would pass for 8-bit codes."""
    columns = 256
    tensors = {
        "weight_packed": torch.zeros(8, -(-columns // (32 // bits)), dtype=torch.int32),
        "weight_scale": torch.ones(8, columns // 128),
        "weight_shape": torch.tensor([8, columns]),
    }
    with pytest.raises(CheckpointError, match="without gaps"):
        CT.describe(CT.scheme(CT.config({"x": LinearKey.parse(f"int{bits}:group128:bf16")}, [])), "x", headers(tensors))


@pytest.mark.parametrize("shape", [(256, 255), (128, 257), (0, 0), (-256, 256)])
def test_a_weight_shape_of_another_layer(shape: tuple[int, int]) -> None:
    tensors = CT.write(layer(KEYS["W4A16"]), KEYS["W4A16"])
    with pytest.raises(CheckpointError, match=rf"weight_shape says \[{shape[0]}, {shape[1]}\]"):
        CT.read(StoredLayer(KEYS["W4A16"], "pack-quantized"), {**tensors, "weight_shape": torch.tensor(shape)}, SHAPE)


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["weight_global_scale", "input_global_scale"])
def test_divisors_that_divide_nothing(name: str, divisor: float) -> None:
    tensors = CT.write(layer(KEYS["NVFP4"]), KEYS["NVFP4"])
    stored = StoredLayer(KEYS["NVFP4"], "nvfp4-pack-quantized")
    with pytest.raises(CheckpointError, match=f"{name} is .*needed a positive divisor"):
        CT.read(stored, {**tensors, name: torch.tensor([divisor])}, SHAPE)


def test_any_divisor_is_kept() -> None:
    key = KEYS["NVFP4"]
    divisors = torch.rand(500) * 3000 + 1
    for divisor in divisors:
        record = layer(key, (4, 16)).with_tensors(global_scale=(1.0 / divisor.double()).reshape(1, 1))
        tensors = CT.write(record, key)
        assert tensors["weight_global_scale"] == divisor
        back = CT.read(StoredLayer(key, "nvfp4-pack-quantized"), tensors, (4, 16))
        assert torch.equal(back["global_scale"], record["global_scale"])


# --- act-order -------------------------------------------------------------------------------------------------------


def act_order(order: torch.Tensor) -> dict[str, torch.Tensor]:
    record = quantize(torch.randn(16, order.numel()), KEYS["int4:group32:f32"].weight)
    return CT.write(record, KEYS["int4:group32:f32"]) | {"weight_g_idx": order.int()}


def read_act_order(tensors: dict[str, torch.Tensor], shape: tuple[int, int] = (16, 128)) -> Any:
    return CT.read(StoredLayer(KEYS["int4:group32:f32"], "pack-quantized"), tensors, shape)


def test_act_order_is_read_and_not_written() -> None:
    order = torch.randperm(128) // 32
    record = read_act_order(act_order(order))
    assert torch.equal(record["order"], order.int())
    with pytest.raises(OutputError, match="act-order"):
        CT.write(record, KEYS["int4:group32:f32"])


@pytest.mark.parametrize("order", [torch.arange(128) // 32, torch.full((128,), -1)], ids=["in order", "unset"])
def test_act_order_that_says_nothing_is_dropped(order: torch.Tensor) -> None:
    assert "order" not in read_act_order(act_order(order))


def test_act_order_cannot_be_split_along_its_groups() -> None:
    tensors = act_order(torch.randperm(128) // 32)
    specs = CT.specs(StoredLayer(KEYS["int4:group32:f32"], "pack-quantized"))
    half = {}
    for spec in specs:
        if spec.name in tensors:
            cut = spec.shard("K", 128, 0, 2)
            half[spec.name] = tensors[spec.name].narrow(*cut) if cut else tensors[spec.name]
    with pytest.raises(CheckpointError, match="cannot be split along K"):
        read_act_order(half, (16, 64))


# --- what is not written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("e2m1:group16:e4m3/tensor:f32", (16, 40), "groups of 16"),
        ("e2m1:group32:e8m0", (16, 48), "groups of 32"),
        ("e5m2:tensor:f32", (16, 32), "e5m2"),
        ("e4m3fnuz:tensor:f32", (16, 32), "e4m3fnuz"),
        ("uint4:asym:group32:f16", (16, 32), "uint4"),
        ("e4m3:asym:tensor:f32", (16, 32), "asym"),
        ("int4:block16x16:f32", (16, 32), "block16x16"),
        ("int4:group32:e8m0", (16, 32), "e8m0"),
        ("e2m1:group16:e8m0", (16, 32), "e2m1:group16:e8m0"),
        ("e4m3:tensor:f32 * e5m2:tensor:f32", (16, 32), "activations of e5m2"),
        ("int8:channel:f32 * int8:token:f32", (16, 32), "activations of int8:token:f32"),
        ("e4m3:channel:f32 * e4m3:block16x16:f32:dynamic", (16, 32), "activations of"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], words: str) -> None:
    assert words in (CT.refuse(LinearKey.parse(key), shape) or "")


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("int4:group64:bf16", (16, 96), "group64 weights do not divide K=96"),
        ("e4m3:channel:bf16 * e4m3:group128:f32:dynamic", (128, 192), "group128 activations do not divide K=192"),
        ("int4:group64:bf16", (16, 128), "None"),
        ("e4m3:channel:bf16 * e4m3:token:f32:dynamic", (16, 7), "None"),
    ],
)
def test_cautions(key: str, shape: tuple[int, int], words: str) -> None:
    assert CT.refuse(LinearKey.parse(key), shape) is None
    assert words in str(CT.caution(LinearKey.parse(key), shape))


def test_static_scales_that_are_not_known() -> None:
    with pytest.raises(OutputError, match=r"input_scale of .* is not known"):
        CT.write(quantize(torch.randn(SHAPE), KEYS["FP8"].weight), KEYS["FP8"])
