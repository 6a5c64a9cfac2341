"""Weight tiles: the layout against the definition, and the programs over it on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.linear import triton_tiles
from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.linear.triton_tiles import TritonTiles
from fewbit.kernels.linear.triton_tiles_emulated import TritonTilesEmulated
from fewbit.kernels.linear.triton_tiles_quantized import TritonTilesQuantized
from fewbit.kernels.linear.weight_tiles import layout_of, tile_numbers, tile_tensors
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.spec import DEVICES
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer, moved, placed
from tests.kernels.triton_here import DEVICE, needs_triton

KERNEL = TritonTiles()
QUANTIZED = TritonTilesQuantized()
EMULATED = TritonTilesEmulated()
H200 = DEVICES["sm90"]
TAKEN = [name for name, key in KEYS.items() if KERNEL.refuse(LinearRequest(key, 64, 256), H200) is None]
# One of each way to decode and to scale; the rest differ in data only.
WAYS = (
    "W2A16 unsigned asym", "W3A16", "W4A16", "W4A16_ASYM", "W4A16 g16", "W4A16 biased", "W4A16 signed asym", "W8A16",
    "W8A16_ASYM", "NVFP4A16", "MXFP4A16", "MXFP8", "FP8 weight-only", "FP8_BLOCK",
)  # fmt: skip


def run(record: QuantizedTensor, name: str, dtype: str, tokens: tuple[int, ...], kernel: LinearKernel = KERNEL) -> None:
    """Calls of several numbers of rows against the definition; every second one has a bias."""
    request = LinearRequest.of(record, KEYS[name], dtype)
    prepared = placed(kernel.prepare(record, request), DEVICE)
    there = moved(record, DEVICE)
    for turn, rows in enumerate(tokens):
        x = inputs((rows, request.columns), DTYPES[dtype]).to(DEVICE)
        bias = torch.randn(request.rows).to(DTYPES[dtype]).to(DEVICE) if turn % 2 else None
        y = kernel.run(x, prepared, bias)
        assert (y.shape, y.dtype) == ((rows, request.rows), DTYPES[dtype])
        assert_close(y, expected(x, there, request.key, bias, kernel), dtype)
        assert torch.equal(kernel.run(x, prepared, bias), y), "the order of sums is fixed"
        assert not prepared.tensors["counters"].any()


def test_what_tiles_take() -> None:
    refused = set(KEYS) - set(TAKEN)
    assert set(WAYS) <= set(TAKEN)
    assert not refused, refused
    for device in ("sm80", "sm90", "sm100", "sm120"):
        assert KERNEL.refuse(LinearRequest(KEYS["W4A16"], 64, 256), DEVICES[device]) is None
    assert KERNEL.refuse(LinearRequest(KEYS["W4A16"], 64, 256, "f16"), DEVICES["sm75"]) is None
    refusal = KERNEL.refuse(LinearRequest(KEYS["W4A16"], 64, 256), DEVICES["sm75"])
    assert refusal is not None
    assert "bf16" in refusal.reason


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (96, 256), (33, 576), (1, 128)])
def test_tiles_stand_for_the_numbers_of_the_record(name: str, rows: int, columns: int) -> None:
    record = layer(KEYS[name], rows, columns)
    layout = layout_of(LinearRequest.of(record, KEYS[name]))
    if layout is None:
        assert columns % 16 or KEYS[name].weight.granularity.columns > columns or not KEYS[name].weight.symmetric
        return
    tensors = tile_tensors(record, layout)
    torch.testing.assert_close(tile_numbers(tensors, layout), dequantize(record), rtol=2e-7, atol=0)
    assert sum(tensor.nbytes for tensor in tensors.values()) == layout.nbytes


@given(st.data())
def test_nvfp4_scales_of_any_sign_and_zero(data: st.DataObject) -> None:
    record = layer(KEYS["NVFP4A16"], 32, 64)
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    scales = data.draw(st.lists(st.sampled_from(codes), min_size=128, max_size=128))
    scale = torch.tensor(scales, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(32, 4)
    record = record.with_tensors(scale=scale)
    layout = layout_of(LinearRequest.of(record, KEYS["NVFP4A16"]))
    assert layout is not None
    found = tile_numbers(tile_tensors(record, layout), layout)
    torch.testing.assert_close(found, dequantize(record), rtol=2e-7, atol=0)


def test_codes_beyond_the_element_are_an_error() -> None:
    record = layer(KEYS["W3A16"], 32, 128)
    codes = record["codes"].clone()
    codes[5, 7] = 9
    broken = record.with_tensors(codes=codes)
    with pytest.raises(CheckpointError, match="to 9 are stored as int3"):
        KERNEL.prepare(broken, LinearRequest.of(broken, KEYS["W3A16"]))


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", WAYS)
def test_programs_multiply_what_the_definition_does(name: str, dtype: str) -> None:
    run(layer(KEYS[name], 33, 576), name, dtype, (0, 19))
    run(layer(KEYS[name], 32, 256), name, dtype, (1, 3))


@needs_triton
@pytest.mark.parametrize("name", WAYS)
def test_weights_decoded_first_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tiles, "plan_for", lambda *_: Plan(decodes_first=True))
    run(layer(KEYS[name], 33, 192), name, "bf16", (5, 2))


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", WAYS)
def test_scales_folded_into_weights_give_the_same(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tiles, "plan_for", lambda *_: Plan(folds=True))
    run(layer(KEYS[name], 33, 320), name, dtype, (5,))


@needs_triton
@pytest.mark.parametrize(
    "plan",
    [
        Plan(), Plan(programs=3), Plan(32, 16, programs=7), Plan(64, 32, 8, 3, 4), Plan(programs=1),
        Plan(described=True), Plan(64, 32, programs=3, folds=True, described=True),
    ],
)  # fmt: skip
def test_every_plan_gives_the_same(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tiles, "plan_for", lambda *_: plan)
    run(layer(KEYS["W4A16"], 128, 1280), "W4A16", "bf16", (1, 18))


@needs_triton
def test_more_blocks_than_counters_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    record = layer(KEYS["W4A16"], 128, 512)
    request = LinearRequest.of(record, KEYS["W4A16"])
    prepared = placed(KERNEL.prepare(record, request), DEVICE)
    few = replace(prepared, tensors={**prepared.tensors, "counters": prepared.tensors["counters"][:1].clone()})
    monkeypatch.setattr(triton_tiles, "plan_for", lambda *_: Plan(programs=3))
    x = inputs((3, 512), torch.bfloat16).to(DEVICE)
    torch.testing.assert_close(KERNEL.run(x, few, None), KERNEL.run(x, prepared, None), rtol=1e-2, atol=1e-2)
    assert not few.tensors["counters"].any()


ACTIVATIONS = ("FP8_DYNAMIC", "FP8", "FP8 tensor per token", "W8A8", "W8A8 static", "W8A8 asym", "W4A8", "W4A4 channel")


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_activations_are_kept(name: str, dtype: str) -> None:
    record = layer(KEYS[name], 33, 192)
    assert QUANTIZED.refuse(LinearRequest.of(record, KEYS[name], dtype), H200) is None
    run(record, name, dtype, (0, 1, 18), QUANTIZED)


@needs_triton
@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "MXFP8"])
def test_block_scaled_activations_are_emulated(name: str) -> None:
    record = layer(KEYS[name], 33, 192)
    for device in ("sm80", "sm90", "sm120"):
        assert EMULATED.refuse(LinearRequest.of(record, KEYS[name]), DEVICES[device]) is None
    assert EMULATED.refuse(LinearRequest.of(record, KEYS[name], "f16"), DEVICES["sm75"]) is None
    run(record, name, "bf16", (0, 1, 18), EMULATED)
    run(record, name, "f16", (3,), EMULATED)


def test_only_block_scaled_activations_are_emulated() -> None:
    for name, words in (("NVFP4A16", "nothing to emulate"), ("FP8_DYNAMIC", "groups under scales of e8m0 or e4m3")):
        refusal = EMULATED.refuse(LinearRequest(KEYS[name], 64, 256), H200)
        assert refusal is not None
        assert words in refusal.reason


@needs_triton
@pytest.mark.parametrize("name", ACTIVATIONS[:2])
def test_quantized_activations_of_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_tiles, "plan_for", lambda *_: Plan(decodes_first=True))
    run(layer(KEYS[name], 33, 192), name, "bf16", (5, 2), QUANTIZED)


def test_dynamic_scales_of_all_tokens_and_long_rows_are_refused() -> None:
    for name, columns, sentence in (("FP8 dynamic tensor", 256, "all tokens"), ("FP8_DYNAMIC", 32768, "one program")):
        refusal = QUANTIZED.refuse(LinearRequest(KEYS[name], 64, columns), H200)
        assert refusal is not None
        assert sentence in refusal.reason
