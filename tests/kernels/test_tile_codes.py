"""Weight tiles decoded to E4M3 codes: the same numbers, and products of both sides' codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear import quantized_tiles
from fewbit.kernels.linear.product_layout import product_numbers
from fewbit.kernels.linear.tile_codes import codes_layout
from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.linear.triton_tiles_quantized import TritonTilesQuantized
from fewbit.kernels.linear.weight_tiles import TileLayout, tile_numbers
from fewbit.spec import DEVICES, LinearKey
from tests.kernels.layers import KEYS, assert_close, cpu_multiplies_fp8_by_rows, expected, inputs, layer, moved, placed
from tests.kernels.triton_here import DEVICE, needs_triton

KERNEL = TritonTilesQuantized()
KEYS_OF_CODES = {name: KEYS[name] for name in ("W4AF8 g128", "MXFP4 AF8")}
OTHERS = {name: KEYS[name] for name in ("W8A8", "W5AF8", "W4AF8 g32", "W4AF8 static", "FP8_BLOCK", "W4A16", "NVFP4")}
OTHERS["W4AF8 asym g128"] = LinearKey(KEYS["W4A16 asym g128"].weight, KEYS["FP8_DYNAMIC"].activation)


@needs_triton
@pytest.mark.parametrize("name", KEYS_OF_CODES)
def test_codes_stand_for_the_numbers_of_the_tiles(name: str) -> None:
    from fewbit.kernels.programs.launch import decode_to_codes

    key = KEYS_OF_CODES[name]
    record = layer(key, 80, 384)
    request = LinearRequest.of(record, key)
    prepared = placed(KERNEL.prepare(record, request), DEVICE)
    layout = TileLayout.parse(str(prepared.constants["layout"]))
    assert layout.decodes_to == "e4m3"
    assert KERNEL.prepared_bytes(request) == prepared.nbytes
    weight, scale = decode_to_codes(prepared.tensors, layout)
    row_scale = prepared.tensors["code_scales"][1, : layout.rows]
    numbers = product_numbers({"weight": weight, "scale": scale, "row_scale": row_scale}, codes_layout(layout))
    torch.testing.assert_close(numbers, tile_numbers(dict(prepared.tensors), layout), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_code_holds_or_has_not_run_is_decoded_to_numbers(name: str) -> None:
    """Integers beyond 16, groups that torch's product does not have, activations that are not FP8 by row."""
    record = layer(OTHERS[name], 64, 384)
    request = LinearRequest.of(record, OTHERS[name])
    if KERNEL.refuse(request, DEVICES["sm90"]) is None:
        assert "code_scales" not in KERNEL.prepare(record, request).tensors


def test_fp4_whose_scales_are_far_apart_is_decoded_to_numbers() -> None:
    record = layer(KEYS["MXFP4 AF8"], 64, 384)
    request = LinearRequest.of(record, KEYS["MXFP4 AF8"])
    scale, codes = torch.full_like(record["scale"], 120), record["codes"].clone()
    scale[3, 1] = 120 - 11
    codes[5, 32:64], scale[5, 1] = 8, 3  # a group of zeros
    codes[6], scale[6] = 0, 9
    near = record.with_tensors(scale=scale, codes=codes)
    prepared = KERNEL.prepare(near, request)
    assert prepared.tensors["code_scales"].isfinite().all()
    scale = scale.clone()
    scale[7, 2] = 120 - 12
    assert "code_scales" not in KERNEL.prepare(near.with_tensors(scale=scale), request).tensors


@needs_triton
@pytest.mark.parametrize("name", KEYS_OF_CODES)
def test_many_rows_are_multiplied_as_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = "g128" in name
    if DEVICE == "cpu":
        if grouped or not cpu_multiplies_fp8_by_rows():
            pytest.skip("This torch has the product of these codes on a GPU only.")
        monkeypatch.setattr(quantized_tiles, "vendor_runs", lambda *_: True)
    used = []
    by_codes = quantized_tiles._by_codes
    monkeypatch.setattr(quantized_tiles, "plan_for", lambda *_: Plan(decodes_first=True))
    monkeypatch.setattr(quantized_tiles, "_by_codes", lambda *arguments: used.append(1) or by_codes(*arguments))
    record = layer(KEYS_OF_CODES[name], 80, 384)
    request = LinearRequest.of(record, KEYS_OF_CODES[name])
    prepared = placed(KERNEL.prepare(record, request), DEVICE)
    for rows in (5, 2):
        x = inputs((rows, 384), torch.bfloat16).to(DEVICE)
        bias = torch.randn(80).bfloat16().to(DEVICE) if rows == 2 else None
        y = KERNEL.run(x, prepared, bias)
        assert_close(y, expected(x, moved(record, DEVICE), request.key, bias, KERNEL), "bf16")
    assert len(used) == 2
    fixed = replace(prepared, constants={**prepared.constants, "same_bits": True})
    KERNEL.run(x, fixed, None)
    assert len(used) == 2, "one plan serves every M of a batch-invariant layer"
