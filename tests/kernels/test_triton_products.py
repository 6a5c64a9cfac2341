"""Products on 8-bit tensor cores: the layout against the definition, the programs on a GPU or in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fewbit.errors import CheckpointError
from fewbit.kernels.activation.producer import gated, normed
from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.linear import products
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of, product_numbers, product_tensors
from fewbit.kernels.linear.tile_plans import Plan
from fewbit.kernels.linear.triton_fp8 import TritonFp8
from fewbit.kernels.linear.triton_int8 import TritonInt8
from fewbit.kernels.linear.triton_tiles import TritonTiles
from fewbit.kernels.linear.triton_tiles_emulated import TritonTilesEmulated
from fewbit.kernels.linear.triton_tiles_quantized import TritonTilesQuantized
from fewbit.kernels.linear.vendor_products import vendor_multiplies
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.spec import DEVICES
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer, moved, placed
from tests.kernels.triton_here import DEVICE, needs_triton

INT8, FP8 = TritonInt8(), TritonFp8()
H200 = DEVICES["sm90"]
KERNELS: dict[str, LinearKernel] = {
    **dict.fromkeys(
        (
            "W8A8", "W8A8 static", "W8A8 asym", "W8A8 asym unsigned", "W8A8 asym static", "W8A8 groups", "W4A8",
            "W4A8 g128", "W4A8 channel", "W4A4 channel",
        ),
        INT8,
    ),
    **dict.fromkeys(
        (
            "FP8", "FP8_DYNAMIC", "FP8 channel static", "FP8_BLOCK", "FP8 groups of 64", "W4AF8 g128", "W4AF8 g32",
            "W4AF8 static", "W5AF8", "MXFP4 AF8",
        ),
        FP8,
    ),
}  # fmt: skip
OPERANDS = {INT8: "int8", FP8: "e4m3"}


def run(record: QuantizedTensor, name: str, dtype: str, tokens: tuple[int, ...]) -> None:
    """Calls of several numbers of rows against the definition; every second one has a bias."""
    kernel, request = KERNELS[name], LinearRequest.of(record, KEYS[name], dtype)
    assert kernel.refuse(request, H200) is None
    prepared = placed(kernel.prepare(record, request), DEVICE)
    there = moved(record, DEVICE)
    for turn, rows in enumerate(tokens):
        x = inputs((rows, request.columns), DTYPES[dtype]).to(DEVICE)
        bias = torch.randn(request.rows).to(DTYPES[dtype]).to(DEVICE) if turn % 2 else None
        y = kernel.run(x, prepared, bias)
        assert (y.shape, y.dtype) == ((rows, request.rows), DTYPES[dtype])
        assert_close(y, expected(x, there, request.key, bias, kernel), dtype)
        if turn == 1:
            assert torch.equal(kernel.run(x, prepared, bias), y), "the order of sums is fixed"
        assert not prepared.tensors["counters"].any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (33, 576), (16, 256)])
def test_codes_stand_for_the_numbers_of_the_record(name: str, rows: int, columns: int) -> None:
    kernel, record = KERNELS[name], layer(KEYS[name], rows, columns)
    request = LinearRequest.of(record, KEYS[name])
    layout = product_layout_of(request, OPERANDS[kernel])
    if layout is None:
        assert kernel.refuse(request, H200) is not None
        assert columns < 64
        return
    tensors = product_tensors(record, layout, with_sums=False)
    torch.testing.assert_close(product_numbers(tensors, layout), dequantize(record), rtol=2e-7, atol=0)
    assert sum(tensor.nbytes for tensor in tensors.values()) == layout.nbytes


def test_scales_of_blocks_are_prepared_as_torch_takes_them() -> None:
    record = layer(KEYS["FP8_BLOCK"], 256, 1024)
    layout = product_layout_of(LinearRequest.of(record, KEYS["FP8_BLOCK"]), "e4m3")
    assert layout is not None
    assert vendor_multiplies(layout)
    tensors = product_tensors(record, layout, with_sums=False)
    assert torch.equal(tensors["block_scale"], record["scale"].float())
    assert sum(tensor.nbytes for tensor in tensors.values()) == layout.nbytes


def test_fp4_whose_scales_are_far_apart_is_not_folded() -> None:
    """E4M3 holds E2M1 times powers of two down to 2**-11; groups of zeros may have any scale."""
    record = layer(KEYS["MXFP4 AF8"], 16, 256)
    scale, codes = record["scale"].clone(), record["codes"].clone()
    scale[:] = 120
    scale[3, 1] = 120 - 11
    codes[5, 32:64], scale[5, 1] = 8, 3
    near = record.with_tensors(scale=scale, codes=codes)
    scale = scale.clone()
    scale[7, 2] = 120 - 12
    far = record.with_tensors(scale=scale, codes=codes)
    request = LinearRequest.of(record, KEYS["MXFP4 AF8"])
    for one, folds in ((near, True), (far, False)):
        prepared = FP8.prepare(one, request)
        layout = ProductLayout.parse(prepared.constants["layout"])
        assert layout.folds == folds
        numbers = product_numbers(dict(prepared.tensors), layout)
        torch.testing.assert_close(numbers, dequantize(one), rtol=0, atol=0)
        assert (layout.decoded().group == 0) == folds


@pytest.mark.parametrize("name", ["W8A8", "W4A8 g128"])
def test_codes_beyond_the_element_are_an_error(name: str) -> None:
    weight = replace(KEYS[name].weight, element=replace(KEYS["W3A16"].weight.element))
    key = replace(KEYS[name], weight=weight)
    record = layer(key, 32, 128)
    codes = record["codes"].clone()
    codes[5, 7] = 9
    broken = record.with_tensors(codes=codes)
    with pytest.raises(CheckpointError, match="to 9 are stored as int3"):
        INT8.prepare(broken, LinearRequest.of(broken, key))


@needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_programs_multiply_what_the_definition_does(name: str) -> None:
    run(layer(KEYS[name], 33, 192), name, "bf16", (0, 19))
    run(layer(KEYS[name], 32, 64), name, "f16", (1,))


@needs_triton
@pytest.mark.parametrize("name", ["W8A8", "FP8_BLOCK", "W4A8 g128", "W4AF8 g128", "MXFP4 AF8"])
def test_weights_decoded_first_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "plan_for", lambda *_: Plan(decodes_first=True))
    run(layer(KEYS[name], 33, 384), name, "bf16", (5, 2))


@needs_triton
@pytest.mark.parametrize("columns", [64, 384, 512])
def test_fp4_folds_scales_of_one_two_or_four_groups_to_a_run(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "plan_for", lambda *_: Plan(64, 16, 4, 3, 3))
    run(layer(KEYS["MXFP4 AF8"], 80, columns), "MXFP4 AF8", "bf16", (3, 17))


@needs_triton
@pytest.mark.parametrize(
    "plan", [Plan(programs=3), Plan(32, 16, programs=7), Plan(64, 32, 8, 3, 4), Plan(16, 16, depth=64)]
)
@pytest.mark.parametrize("name", ["W8A8", "FP8_BLOCK"])
def test_every_plan_gives_the_same(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "plan_for", lambda *_: plan)
    run(layer(KEYS[name], 128, 384), name, "bf16", (1, 33))


@needs_triton
@pytest.mark.parametrize(
    "plan", [Plan(32, 16, 4, 3, 3, described=True), Plan(32, 16, 4, 3, 4, described=True, splits=True)]
)
@pytest.mark.parametrize("name", ["W8A8", "W8A8 asym", "W8A8 asym static", "FP8_DYNAMIC", "FP8_BLOCK", "W4A8 g128"])
def test_codes_read_through_descriptors_give_the_same(name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scales of groups lie between, the plan does without descriptors."""
    monkeypatch.setattr(products, "plan_for", lambda *_: plan)
    run(layer(KEYS[name], 80, 320), name, "bf16", (1, 33))


@needs_triton
@pytest.mark.parametrize("name", ["W8A8", "FP8_BLOCK", "W4AF8 g128", "W4A16", "NVFP4"])
def test_a_batch_invariant_layer_gives_a_row_the_same_bits_at_every_m(name: str) -> None:
    """Whatever rows are beside it; more rows than there are counters for at once, and several parts of K."""
    record = layer(KEYS[name], 16, 256)
    request = LinearRequest.of(record, KEYS[name], batch_invariant=True)
    kernels = (*dict.fromkeys(KERNELS.values()), TritonTiles(), TritonTilesQuantized(), TritonTilesEmulated())
    many = (1, 17, 65) if DEVICE == "cpu" else (1, 16, 17, 32, 64, 65, 256, 257)
    ran = 0
    for kernel in kernels:
        if kernel.refuse(request, H200) is not None:
            continue
        prepared, ran = placed(kernel.prepare(record, request), DEVICE), ran + 1
        few = {**prepared.tensors, "counters": prepared.tensors["counters"][:1].clone()}
        x = inputs((many[-1], 256), torch.bfloat16).to(DEVICE)
        whole = kernel.run(x, replace(prepared, tensors=few), None)
        assert_close(whole, expected(x, moved(record, DEVICE), request.key, None, kernel), "bf16")
        for rows in many[:-1]:
            assert torch.equal(kernel.run(x[:rows], prepared, None), whole[:rows]), (kernel.name, rows)
    assert ran


@pytest.mark.parametrize("kind", ["gated", "normed"])
@pytest.mark.parametrize("name", ["W8A8 asym", "FP8_BLOCK"])
def test_activations_are_made_and_rounded_in_one_operation(name: str, kind: str) -> None:
    """As if the producer had run before, on any device; a batch-invariant layer has rows in several pieces."""
    kernel, record = KERNELS[name], layer(KEYS[name], 32, 128)
    for same_bits in (False, True):
        request = LinearRequest.of(record, KEYS[name], batch_invariant=same_bits)
        prepared = placed(kernel.prepare(record, request), DEVICE)
        few = {**prepared.tensors, "counters": prepared.tensors["counters"][:1].clone()}
        both = torch.randn(2, 33 if same_bits else 2, 256, device=DEVICE).bfloat16()
        x, up = both[..., :128], both[..., 128:]
        producer = gated(up) if kind == "gated" else normed(torch.rand(128, device=DEVICE).bfloat16() + 0.5, 1e-6)
        y = kernel.run_produced(x, producer, replace(prepared, tensors=few), None)
        wanted = kernel.run(producer(x), prepared, None)
        assert y.shape == (*x.shape[:2], 32)
        torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)
