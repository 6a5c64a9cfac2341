"""Quantizing the golden weights gives the scales and numbers that the original projects' own code gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewbit.numerics import QuantizedTensor, dequantize, quantize
from fewbit.spec import QuantKey, ScaleRules
from tests.golden import floats, stored

VECTORS = {
    "ct_w4a16_group32_sym": "int4:group32:f32",
    "ct_w4a16_group32_asym": "int4:asym:group32:f32",
    "ct_w8_channel_int": "int8:channel:f32",
    "ct_fp8_tensor": "e4m3:tensor:f32",
    "ct_fp8_channel": "e4m3:channel:f32",
    "ct_fp8_block4x32": "e4m3:block4x32:f32",
    "ct_nvfp4": "e2m1:group16:e4m3/tensor:f32",
    "ct_mxfp4": "e2m1:group32:e8m0",
    "ct_mxfp6_e2m3": "e2m3:group32:e8m0",
}
ROUNDED_TO_BF16 = {"ct_nvfp4"}  # its decompressor returned bfloat16


@pytest.mark.parametrize(("name", "key"), VECTORS.items())
def test_dequantized_weights(name: str, key: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    back = dequantize(quantize(floats(vector["weight_out_in"]), QuantKey.parse(key)))
    if name in ROUNDED_TO_BF16:
        back = back.bfloat16().float()
    assert torch.equal(back, floats(vector["dequant_out_in"]))


@pytest.mark.parametrize(("name", "key"), VECTORS.items())
def test_stored_scales(name: str, key: str, golden: dict[str, Any]) -> None:
    tensors = golden[name]["tensors"]
    record = quantize(floats(golden[name]["weight_out_in"]), QuantKey.parse(key))
    expected = stored(tensors["weight_scale"]).reshape(record["scale"].shape)
    assert record["scale"].dtype == expected.dtype
    assert torch.equal(record["scale"].view(torch.uint8), expected.view(torch.uint8))
    if "weight_global_scale" in tensors:
        divisor = stored(tensors["weight_global_scale"])
        assert torch.equal((1 / record["global_scale"]).float().flatten(), divisor)


def test_mxfp8_differs_from_compressed_tensors_only_in_the_documented_rule(golden: dict[str, Any]) -> None:
    vector = golden["ct_mxfp8"]
    weight = floats(vector["weight_out_in"])
    record = quantize(weight, QuantKey.parse("e4m3:group32:e8m0"))
    theirs = stored(vector["tensors"]["weight_scale"])
    fraction = 2 * torch.frexp(weight.unflatten(-1, (-1, 32)).abs().amax(-1)).mantissa
    expected = theirs - ((fraction >= 1.75) & (fraction < 1.9375)).to(torch.uint8)
    assert torch.equal(record["scale"], expected)
    same = (record["scale"] == theirs).repeat_interleave(32, -1)
    assert same.float().mean() > 0.5
    assert torch.equal(dequantize(record)[same], floats(vector["dequant_out_in"])[same])


@pytest.mark.parametrize(
    ("name", "key", "scale"),
    [
        ("fp8_block_weight_scale_inv", "e4m3:block4x4:f32", "weight_scale_inv_f32"),  # edge blocks are smaller
        ("fp8_block_ue8m0", "e4m3:block4x4:e8m0", "scale_e8m0_bytes"),
        ("modelopt_mxfp8", "e4m3:group32:e8m0", "weight_scale_e8m0"),
    ],
)
def test_other_producers(name: str, key: str, scale: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    record = quantize(floats(vector["weight_out_in"]), QuantKey.parse(key), ScaleRules(mx="ceil"))
    assert torch.equal(record["scale"].float(), floats(vector[scale]))
    assert torch.equal(dequantize(record), floats(vector["dequant_out_in"]))


def test_modelopt_mxfp4_scales(golden: dict[str, Any]) -> None:
    # Its codes differ by design of theirs: it rounds ties towards zero and writes minus zero for zero.
    vector = golden["modelopt_mxfp4"]
    weight, key = floats(vector["weight_out_in"]), QuantKey.parse("e2m1:group32:e8m0")
    record = quantize(weight, key, ScaleRules(mx="ceil"))
    assert record["scale"].tolist() == vector["weight_scale_e8m0"]
    ours, theirs = dequantize(record), floats(vector["dequant_out_in"])
    assert torch.equal((ours - weight).abs(), (theirs - weight).abs())  # they part at ties only


def test_modelopt_nvfp4_scales(golden: dict[str, Any]) -> None:
    vector = golden["modelopt_nvfp4"]
    record = quantize(floats(vector["weight_out_in"]), QuantKey.parse("e2m1:group16:e4m3/tensor:f32"))
    assert record["scale"].float().tolist() == vector["weight_scale_values"]
    assert record["global_scale"].item() == pytest.approx(vector["weight_scale_2"], rel=1e-7)
    torch.testing.assert_close(dequantize(record), floats(vector["dequant_out_in"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["gptq_int4", "gptq_int4_desc_act", "gptq_int3", "gptq_int8"])
def test_gptq_records_dequantize(name: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    tensors = {
        "codes": torch.tensor(vector["codes_in_out"], dtype=torch.uint8).T,
        "zero_point": torch.tensor(vector["zeros_group_out"], dtype=torch.uint8).T,
        "scale": floats(vector["scales_group_out"]).T,
        "order": torch.tensor(vector["g_idx"], dtype=torch.int32),
    }
    key = QuantKey.parse(f"uint{vector['bits']}:asym:group{vector['group_size']}:f32")
    record = QuantizedTensor(key, (vector["out_features"], vector["in_features"]), tensors)
    record.validate(name)
    assert torch.equal(dequantize(record).T, floats(vector["dequant_in_out"]))
    if not vector["desc_act"]:
        natural = QuantizedTensor(key, record.shape, {role: tensors[role] for role in ("codes", "zero_point", "scale")})
        assert torch.equal(dequantize(natural), dequantize(record))
