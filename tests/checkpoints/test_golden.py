"""Golden vectors: the original projects' bytes read to their numbers, and their weights written to their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewbit.checkpoints.compressed_tensors import CompressedTensors
from fewbit.checkpoints.fp8 import Fp8
from fewbit.checkpoints.interface import StoredLayer
from fewbit.numerics import QuantizedTensor, dequantize, quantize
from fewbit.packing.registry import dequantize_record, packings
from fewbit.spec import LinearKey, Scheme, integer
from tests.checkpoints.layers import headers, same_bits
from tests.golden import floats, ids, stored, words

CT, FP8 = CompressedTensors(), Fp8()

VECTORS = {
    "ct_w4a16_group32_sym": "pack-quantized",
    "ct_w4a16_group32_asym": "pack-quantized",
    "ct_w8_channel_int": "int-quantized",
    "ct_fp8_tensor": "naive-quantized",
    "ct_fp8_channel": "naive-quantized",
    "ct_fp8_block4x32": "naive-quantized",
    "ct_nvfp4": "nvfp4-pack-quantized",
    "ct_mxfp4": "mxfp4-pack-quantized",
    "ct_mxfp6_e2m3": "mxfp6-pack-quantized",
    "ct_mxfp8": "mxfp8-quantized",
}
DECOMPRESSED_TO_BF16 = {"ct_nvfp4"}
# compressed-tensors chooses MXFP8 exponents by FP4's rounding; weight-only int8 is packed today.
WRITTEN_DIFFERENTLY = {"ct_mxfp8", "ct_w8_channel_int"}


def scheme_of(vector: dict[str, Any]) -> Scheme:
    """The vector's config group in a configuration, as `scheme` reads it."""
    return CT.scheme({"quant_method": "compressed-tensors", "config_groups": {"group_0": vector["scheme"]}})


def read(vector: dict[str, Any]) -> tuple[StoredLayer, QuantizedTensor]:
    tensors = {name: stored(entry) for name, entry in vector["tensors"].items()}
    described = CT.describe(scheme_of(vector), "layer", headers(tensors))
    assert described is not None
    weight = floats(vector["weight_out_in"])
    return described, CT.read(described, tensors, (weight.shape[0], weight.shape[1]))


@pytest.mark.parametrize("name", VECTORS)
def test_compressed_tensors_is_read(name: str, golden: dict[str, Any]) -> None:
    described, record = read(golden[name])
    assert described.variant == VECTORS[name]
    numbers = dequantize_record(record)
    numbers = numbers.bfloat16().float() if name in DECOMPRESSED_TO_BF16 else numbers
    assert torch.equal(numbers, floats(golden[name]["dequant_out_in"]))


@pytest.mark.parametrize("name", [name for name in VECTORS if name not in WRITTEN_DIFFERENTLY])
def test_compressed_tensors_is_written(name: str, golden: dict[str, Any]) -> None:
    key = read(golden[name])[0].key
    weight = floats(golden[name]["weight_out_in"])
    if key.weight.element.name == "e2m1":
        weight += 0.0  # compressed-tensors' FP4 cast forgets the sign of -0.0, fewbit keeps it
    tensors = CT.write(quantize(weight, key.weight), key)
    assert tensors.keys() == golden[name]["tensors"].keys()
    for tensor_name, entry in golden[name]["tensors"].items():
        assert same_bits(tensors[tensor_name], stored(entry))


def test_mxfp8_is_written_with_the_same_codes_where_the_exponents_agree(golden: dict[str, Any]) -> None:
    vector = golden["ct_mxfp8"]
    key = read(vector)[0].key
    tensors = CT.write(quantize(floats(vector["weight_out_in"]), key.weight), key)
    theirs = {name: stored(entry) for name, entry in vector["tensors"].items()}
    agree = tensors["weight_scale"] == theirs["weight_scale"]
    blocks = [codes["weight"].view(torch.uint8).unflatten(-1, (-1, 32))[agree] for codes in (tensors, theirs)]
    assert agree.any()
    assert torch.equal(*blocks)


@pytest.mark.parametrize("name", [name for name in ids("ct_pack_int") if name != "ct_pack_int1"])
def test_words_of_codes_and_zero_points(name: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    element = integer(vector["bits"])
    key = LinearKey.parse(f"{element}:asym:group8:f32")
    codes_layout, zero_point_layout = CT.layouts(CT.storages(key)[0])
    dense = packings()["dense"]
    for field, packed, layout in (
        ("signed_codes_rows", "weight_packed", codes_layout),
        ("signed_zero_points_out_groups", "weight_zero_point_packed_dim0", zero_point_layout),
    ):
        codes = torch.tensor(vector[field], dtype=torch.int8)
        assert torch.equal(dense.pack(codes, layout), words(vector[packed]))
        assert torch.equal(dense.unpack(words(vector[packed]), layout, element, tuple(codes.shape)), codes)


def test_the_sixth_of_a_byte(golden: dict[str, Any]) -> None:
    vector = golden["ct_fp6_pack"]
    layout = CT.layouts(StoredLayer(LinearKey.parse("e2m3:group32:e8m0"), "mxfp6-pack-quantized"))[0]
    record = quantize(floats(vector["values"]), LinearKey.parse("e2m3:tensor:f32").weight)
    unscaled = record.with_tensors(scale=torch.ones_like(record["scale"]))
    assert torch.equal(dequantize(unscaled), floats(vector["values"]))
    assert packings()["dense"].pack(record["codes"], layout).tolist() == vector["packed"]


def _fp8_vector(vector: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    codes = torch.tensor(vector["weight_e4m3_bytes"], dtype=torch.uint8).view(torch.float8_e4m3fn)
    if "weight_scale_inv_f32" in vector:
        return {"weight": codes, "weight_scale_inv": floats(vector["weight_scale_inv_f32"])}, "f32"
    return {"weight": codes, "weight_scale_inv": torch.tensor(vector["scale_e8m0_bytes"], dtype=torch.uint8)}, "e8m0"


@pytest.mark.parametrize("name", ids("fp8_block"))
@pytest.mark.parametrize("container", [torch.uint8, torch.float8_e8m0fnu])
def test_native_fp8_is_read(name: str, container: torch.dtype, golden: dict[str, Any]) -> None:
    tensors, element = _fp8_vector(golden[name])
    if element == "e8m0":
        tensors["weight_scale_inv"] = tensors["weight_scale_inv"].view(container)
    scheme = FP8.scheme({"quant_method": "fp8", "weight_block_size": golden[name]["block"]})
    described = FP8.describe(scheme, "layer", headers(tensors))
    assert described is not None
    assert described.key.weight.scale.element.name == element
    numbers = dequantize_record(FP8.read(described, tensors, tuple(tensors["weight"].shape)))
    assert torch.equal(numbers, floats(golden[name]["dequant_out_in"]))


def test_native_fp8_is_written(golden: dict[str, Any]) -> None:
    vector = golden["fp8_block_weight_scale_inv"]
    rows, columns = vector["block"]
    key = LinearKey.parse(f"e4m3:block{rows}x{columns}:f32 * e4m3:group{columns}:f32:dynamic")
    tensors = FP8.write(quantize(floats(vector["weight_out_in"]), key.weight), key)
    expected, _ = _fp8_vector(vector)
    assert tensors.keys() == expected.keys()
    assert all(same_bits(tensors[name], expected[name]) for name in expected)
