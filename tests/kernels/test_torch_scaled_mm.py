"""Torch's FP8 product. Torch runs it on CPUs too, slowly, so all but the GPU's own arithmetic is tested anywhere."""

from __future__ import annotations

import pytest
import torch

from fewbit.kernels.activation.rounding import MAX_COLUMNS
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.torch_scaled_mm import TorchScaledMm, quantized
from fewbit.numerics import decode, dequantize, quantize
from fewbit.numerics.activations import fake_quantize
from fewbit.spec.element import E4M3
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer, needs_fp8_rows

KERNEL = TorchScaledMm()
WHOLE = ("FP8", "FP8 dynamic tensor")  # one scale a side
LAYERS = ["FP8", "FP8_DYNAMIC", "FP8 channel static", "FP8 tensor per token", "FP8 dynamic tensor"]


@pytest.mark.parametrize("key", [key if key in WHOLE else pytest.param(key, marks=needs_fp8_rows) for key in LAYERS])
def test_both_forms_compute_what_the_key_says(key: str) -> None:
    record = layer(KEYS[key], 48, 64)
    request = LinearRequest.of(record, KEYS[key], "bf16")
    prepared = KERNEL.prepare(record, request)
    for tokens in ((0,), (1,), (17,), (), (2, 3), (0, 2)):
        x = inputs((*tokens, 64), torch.bfloat16)
        for bias in (None, torch.randn(48).bfloat16(), torch.randn(48)):
            y = KERNEL.run(x, prepared, bias)
            assert (y.shape, y.dtype) == ((*tokens, 48), torch.bfloat16)
            assert_close(y, expected(x, record, KEYS[key], bias, KERNEL), "bf16")


@pytest.mark.parametrize("key", LAYERS)
def test_row_wise_only_where_a_side_has_rows(key: str) -> None:
    record = layer(KEYS[key], 48, 64)
    prepared = KERNEL.prepare(record, LinearRequest.of(record, KEYS[key]))
    whole = key in WHOLE
    assert prepared.tensors["scale"].shape == (() if whole else (1, 48))
    assert prepared.tensors["scale"].dtype == torch.float32
    assert prepared.tensors["scale"].is_contiguous()
    assert ("input_scale" in prepared.tensors) == (key in ("FP8", "FP8 channel static"))


def check_codes(key: str, dtype: str, device: str) -> None:
    record, activation = layer(KEYS[key], 16, 64), KEYS[key].activation
    stored = record["input_scale"].to(device) if "input_scale" in record else None
    x = inputs((40, 64), DTYPES[dtype]).to(device)
    codes, scale = quantized(x, stored, activation.granularity.kind == "token")
    there = record if stored is None else record.with_tensors(input_scale=stored)
    assert torch.equal(decode(codes, E4M3) * scale, fake_quantize(x, activation, there))
    assert codes.float().abs().max() == E4M3.max


@pytest.mark.parametrize("key", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_codes_are_those_of_the_definition(key: str, dtype: str) -> None:
    check_codes(key, dtype, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="This machine has no CUDA device.")
@pytest.mark.parametrize("columns", [7, 64, 576, 1025, 14336, MAX_COLUMNS + 16])
def test_rows_of_any_width_are_quantized_as_the_definition_does(columns: int) -> None:
    x = (torch.randn(5, columns) * 10).bfloat16().cuda()
    x[2] = 0
    x[3, 0] = 3e38
    codes, scale = quantized(x, None, per_token=True)
    record = quantize(x, KEYS["FP8_DYNAMIC"].activation)
    assert torch.equal(codes.view(torch.uint8), record["codes"].view(torch.uint8))
    assert torch.equal(codes.float() * scale, dequantize(record))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="This machine has no CUDA device.")
def test_activation_codes_are_those_of_the_definition_on_cuda() -> None:
    for key in LAYERS:
        for dtype in DTYPES:
            check_codes(key, dtype, "cuda")


def test_a_static_scale_saturates_and_never_makes_nan() -> None:
    key = KEYS["FP8"]
    record = layer(key, 16, 32)
    prepared = KERNEL.prepare(record, LinearRequest.of(record, key))
    x = torch.full((1, 32), 1e4).bfloat16()
    y = KERNEL.run(x, prepared, None)
    top = (record["input_scale"] * E4M3.max).double()
    assert_close(y, top * dequantize(record).double().sum(1)[None], "bf16")
