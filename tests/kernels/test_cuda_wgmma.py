"""Weight fragments: the layout against what the tensor cores take, the record, and the sources that read it."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import CheckpointError
from fewbit.kernels.cuda.compiler import read_entry, write_entry
from fewbit.kernels.cuda.products import Problem, decoding_files, macros_of, product_files
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.cuda_wgmma import CudaWgmma
from fewbit.kernels.linear.cuda_wgmma_fp8 import INTEGERS_COUNT, CudaWgmmaFp8, scales_of_codes
from fewbit.kernels.linear.fragment_cuts import FEWEST_STAGES, Cut, cut_for
from fewbit.kernels.linear.fragment_layout import (
    DEPTH,
    ROWS,
    Decoding,
    FragmentLayout,
    fragment_layout_of,
)
from fewbit.kernels.linear.fragment_tensors import fragment_numbers, fragment_tensors, group_scales
from fewbit.kernels.linear.product_layout import product_layout_of, product_numbers, product_tensors
from fewbit.kernels.linear.recoded_scales import can_fold
from fewbit.kernels.linear.row_cuts import RowCut
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.spec import DEVICES
from tests.kernels.cuda_sources import asked, fields_of_problem
from tests.kernels.layers import KEYS, assert_close, expected, inputs, layer

KERNEL, FP8 = CudaWgmma(), CudaWgmmaFp8()
H200 = DEVICES["sm90"].with_software("cuda-core")
TAKEN = [name for name, key in KEYS.items() if KERNEL.refuse(LinearRequest(key, 64, 256), H200) is None]


TAKEN_FP8 = [name for name, key in KEYS.items() if FP8.refuse(LinearRequest(key, 64, 256), H200) is None]


def test_what_fragments_take() -> None:
    integers = {"W4A16", "W4A16_ASYM", "W3A16", "W2A16 unsigned asym", "W4A16 unsigned", "W4A16 g256", "W4A16 channel"}
    assert integers | {"NVFP4A16", "MXFP4A16", "NVFP4A16 joined"} <= set(TAKEN)
    assert {"W5A16", "W8A16", "W8A16 g32", "W8A16 tensor", "FP8 weight-only"} <= set(TAKEN)
    assert not {"W4A16 g16", "MXFP8A16", "W8A16_ASYM", "W4A16 biased", "W4A16 signed asym"} & set(TAKEN)
    assert TAKEN_FP8 == ["W4AF8 g128", "W4AF8 static", "MXFP4 AF8"]


@pytest.mark.parametrize(
    ("request_of", "device", "words"),
    [
        ({}, DEVICES["sm90"], "cuda-core"),
        ({}, DEVICES["sm100"].with_software("cuda-core"), "10.0"),
        ({}, DEVICES["sm80"].with_software("cuda-core"), "8.0"),
        ({"columns": 132}, H200, "multiple of 8"),
        ({"dtype": "f16"}, H200, "scales of f16"),
        ({"dtype": "f32"}, H200, "f32"),
        ({"batch_invariant": True}, H200, "same bits"),
        ({"has_order": True}, H200, "act-order"),
    ],
)
def test_refusals_name_what_is_missing(request_of: dict, device: object, words: str) -> None:
    arguments = {"key": KEYS["W4A16 channel"], "rows": 64, "columns": 256} | request_of
    refusal = KERNEL.refuse(LinearRequest(**arguments), device)
    assert refusal is not None
    assert words in refusal.reason


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (96, 256), (33, 576), (1, 128), (200, 1096)])
def test_fragments_stand_for_the_numbers_of_the_record(name: str, rows: int, columns: int) -> None:
    record = layer(KEYS[name], rows, columns)
    request = LinearRequest.of(record, KEYS[name])
    layout = fragment_layout_of(request)
    if layout is None:
        assert columns % KEYS[name].weight.granularity.columns
        return
    tensors = fragment_tensors(record, layout)
    assert sum(tensor.nbytes for tensor in tensors.values()) == layout.nbytes
    assert tensors["weight"].shape == (layout.units, layout.depths, layout.unit_bytes)
    found, wanted = fragment_numbers(tensors["weight"], layout, tensors.get("row_scale")), dequantize(record)
    if layout.decoding.row_scaled:
        torch.testing.assert_close(found, wanted, rtol=2.0**-22, atol=0)
    else:
        assert torch.equal(found, wanted.bfloat16().float())
    assert FragmentLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (96, 256), (1, 128), (200, 1152)])
@pytest.mark.parametrize("name", TAKEN_FP8)
def test_fragments_for_fp8_stand_for_the_numbers_of_the_record(name: str, rows: int, columns: int) -> None:
    record = layer(KEYS[name], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS[name]), "e4m3")
    assert layout is not None
    for folds in {False, layout.folds}:
        tensors = fragment_tensors(record, replace(layout, folds=folds))
        numbers = fragment_numbers(tensors["weight"], replace(layout, folds=folds), tensors.get("row_scale"))
        assert torch.equal(numbers, dequantize(record))


def test_scales_of_groups_are_read_back_for_torch() -> None:
    record = layer(KEYS["W4AF8 g128"], 200, 384)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4AF8 g128"]), "e4m3")
    assert layout is not None
    weight = fragment_tensors(record, layout)["weight"]
    assert torch.equal(group_scales(weight, layout), record["scale"].t())
    scales = scales_of_codes(weight, None, layout)
    assert scales["row_scale"].shape == (200,), "compiled products read one for each output feature"
    integers = (record["codes"].float() / INTEGERS_COUNT).t()
    numbers = integers * scales["scale"].float().repeat_interleave(128, 0) * scales["row_scale"]
    assert torch.equal(numbers.t(), dequantize(record).float())


def _words(record: QuantizedTensor, layout: FragmentLayout) -> torch.Tensor:
    """Words of codes, int32 [units, depths, 1024]."""
    return fragment_tensors(record, layout)["weight"][..., : layout.code_bytes].contiguous().view(torch.int32)


def _place(data: st.DataObject, layout: FragmentLayout) -> tuple[int, ...]:
    """Unit, depth, warp, lane, step of 16 input features, register and half of it: a place in the left operand."""
    lasts = (layout.units - 1, layout.depths - 1, 3, 31, 7, 3, 1)
    return tuple(data.draw(st.integers(0, last)) for last in lasts)


def _number_at(unit: int, depth: int, warp: int, lane: int, step: int, register: int, half: int) -> tuple[int, int]:
    """The output feature and the input feature of the number at a place."""
    row = unit * ROWS + warp * 16 + lane // 4 * 2 + register % 2
    return row, depth * DEPTH + step * 16 + register // 2 * 8 + lane % 4 * 2 + half


@given(st.data())
def test_a_thread_decodes_its_share_of_the_left_operand_to_e4m3(data: st.DataObject) -> None:
    """By the register layout of 8-bit `wgmma`, with the arithmetic of `decode_e4m3`."""
    rows, columns = data.draw(st.integers(1, 150)), 16 * data.draw(st.integers(1, 20))
    record = layer(KEYS["W4AF8 static"], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4AF8 static"]), "e4m3")
    assert layout is not None
    words = _words(record, layout)
    unit, depth = (data.draw(st.integers(0, count - 1)) for count in (layout.units, layout.depths))
    warp, lane, step, register, byte = (data.draw(st.integers(0, last)) for last in (3, 31, 3, 3, 3))
    word = int(words[unit, depth, step // 2 * 512 + (warp * 32 + lane) * 4 + step % 2 * 2 + register // 2])
    nibbles = (word & 0xFFFFFFFF) >> 4 * (register % 2)
    decoded = (nibbles & 0x07070707) + (nibbles >> 3 & 0x01010101) * 0x81
    bits = torch.tensor([decoded >> 8 * byte & 0xFF], dtype=torch.uint8)
    row = unit * ROWS + warp * 16 + lane // 4 * 2 + register % 2
    column = depth * DEPTH + step * 32 + register // 2 * 16 + lane % 4 * 4 + byte
    inside = row < rows and column < columns
    assert bits.view(torch.float8_e4m3fn).item() * 512 == (int(record["codes"][row, column]) if inside else 0)


@given(st.data())
def test_a_thread_finds_its_share_of_the_left_operand(data: st.DataObject) -> None:
    """By the register layout of `wgmma`: lane / 4 is the row of eight, lane % 4 the pair of input features."""
    rows, columns = data.draw(st.integers(1, 150)), 8 * data.draw(st.integers(1, 40))
    record = layer(KEYS["W4A16 channel"], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4A16 channel"]))
    assert layout is not None
    words = _words(record, layout)
    unit, depth, warp, lane, step, register, half = _place(data, layout)
    word = int(words[unit, depth, step // 4 * 512 + (warp * 32 + lane) * 4 + step % 4]) & 0xFFFFFFFF
    found = word >> (4 * register) >> (16 * half) & 15
    row, column = _number_at(unit, depth, warp, lane, step, register, half)
    inside = row < rows and column < columns
    assert found == (int(record["codes"][row, column]) + 8 if inside else 0)


def _turned(word: int, distance: int) -> int:
    return (word << distance | word >> (32 - distance)) & 0xFFFFFFFF


@given(st.data())
def test_a_thread_decodes_its_share_of_e2m1(data: st.DataObject) -> None:
    """With the arithmetic of `placed` and of `scale_pair` for bf16."""
    name = data.draw(st.sampled_from(["NVFP4A16", "MXFP4A16"]))
    rows, columns = data.draw(st.integers(1, 150)), 32 * data.draw(st.integers(1, 10))
    record = layer(KEYS[name], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS[name]))
    assert layout is not None
    tensors = fragment_tensors(record, layout)
    unit, depth, warp, lane, step, register, half = _place(data, layout)
    words = tensors["weight"][unit, depth].contiguous().view(torch.int32)
    word = int(words[step // 4 * 512 + (warp * 32 + lane) * 4 + step % 4]) & 0xFFFFFFFF
    if register == 3:
        placed = _turned(word, 14) & 0x81808180 | _turned(word, 6) & 0x00400040
    else:
        placed = _turned(word, (0, 4, 10)[register]) & 0x81C081C0
    group, shift, base = step * 16 // layout.group, 4 if layout.group == 16 else 7, 0x7000 if layout.group == 16 else 0
    scales = int(words[layout.code_bytes // 4 + group // 2 * 32 + warp * 8 + lane // 4]) & 0xFFFFFFFF
    pair = scales >> (8 - shift) if group % 2 else scales << shift
    scale = pair >> 16 * (register % 2) & (0xFF << shift) | base
    number, factor = _bf16(placed >> 16 * half & 0xFFFF, scale)
    row, column = _number_at(unit, depth, warp, lane, step, register, half)
    inside = row < rows and column < columns
    wanted = dequantize(record)[row, column].item() if inside else 0.0
    assert number * factor * tensors["row_scale"][row].item() == pytest.approx(wanted, rel=1e-6)


@given(st.data())
def test_a_thread_decodes_its_share_of_bytes(data: st.DataObject) -> None:
    """With the arithmetic of `int8.cuh` and `e4m3.cuh` for bf16."""
    name = data.draw(st.sampled_from(["W8A16", "FP8 weight-only"]))
    rows, columns = data.draw(st.integers(1, 150)), 8 * data.draw(st.integers(1, 40))
    record = layer(KEYS[name], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS[name]))
    assert layout is not None
    tensors = fragment_tensors(record, layout)
    unit, depth, warp, lane, step, register, half = _place(data, layout)
    words = tensors["weight"][unit, depth].contiguous().view(torch.int32)
    word = int(words[step // 2 * 512 + (warp * 32 + lane) * 4 + step % 2 * 2 + register // 2]) & 0xFFFFFFFF
    if layout.element == "int8":
        byte = word >> 8 * (register % 2) >> 16 * half
        number, base = _bf16(byte & 0x7F | 0x4300, byte & 0x80 | 0x4300)
        number = number - base
    else:
        sign, magnitude = (word, word >> 4) if register % 2 else (word << 8, word << 4)
        number, count = _bf16((sign >> 16 * half) & 0x8000 | (magnitude >> 16 * half) & 0x07F0, 0x7B80)
        number = number * count
    row, column = _number_at(unit, depth, warp, lane, step, register, half)
    wanted = dequantize(record)[row, column].item() if row < rows and column < columns else 0.0
    assert number * tensors["row_scale"][row].item() == pytest.approx(wanted, rel=1e-6)


def _bf16(*bits: int) -> list[float]:
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double().tolist()


@given(st.data())
def test_a_thread_looks_e2m1_up_in_e4m3(data: st.DataObject) -> None:
    """With the arithmetic of `look_up` and `Table`."""
    rows, columns = data.draw(st.integers(1, 150)), 32 * data.draw(st.integers(1, 10))
    record = layer(KEYS["MXFP4 AF8"], rows, columns)
    scale = torch.randint(100, 112, record["scale"].shape, dtype=torch.uint8).view(record["scale"].dtype)
    record = record.with_tensors(scale=scale)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["MXFP4 AF8"]), "e4m3")
    assert layout is not None
    tensors = fragment_tensors(record, layout)
    unit, depth = (data.draw(st.integers(0, count - 1)) for count in (layout.units, layout.depths))
    warp, lane, step, register, byte = (data.draw(st.integers(0, last)) for last in (3, 31, 3, 3, 3))
    words = tensors["weight"][unit, depth].contiguous().view(torch.int32)
    word = int(words[step // 2 * 512 + (warp * 32 + lane) * 4 + step % 2 * 2 + register // 2]) & 0xFFFFFFFF
    steps = (
        int(words[layout.code_bytes // 4 + step // 2 * 32 + warp * 8 + lane // 4])
        >> 16 * (register % 2) + 8 * (step % 2)
        & 255
    )
    table = (0x6C686000 - steps * 0x01010100) | (0x7C787470 - steps * 0x01010101) << 32
    chosen = (word & 0x77777777) >> 16 * (register % 2) >> 4 * byte & 7
    sign = (word << 4 * (register % 2)) >> 8 * byte & 0x80
    code = (
        torch.tensor([table >> 8 * chosen & 0xFF | sign], dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    )
    row = unit * ROWS + warp * 16 + lane // 4 * 2 + register % 2
    column = depth * DEPTH + step * 32 + register // 2 * 16 + lane % 4 * 4 + byte
    wanted = dequantize(record)[row, column].item() if row < rows and column < columns else 0.0
    assert code.float().item() * tensors["row_scale"][row].item() == wanted


def test_scales_too_far_apart_stay_outside() -> None:
    record = layer(KEYS["MXFP4 AF8"], 40, 96)
    request, x = LinearRequest.of(record, KEYS["MXFP4 AF8"]), inputs((5, 96), torch.bfloat16)
    codes = torch.full(record["scale"].shape, 120, dtype=torch.uint8)
    codes[3, 1] = 120 - 12
    for distance, folds in ((12, False), (11, True)):
        codes[3, 1] = 120 - distance
        far = record.with_tensors(scale=codes.view(record["scale"].dtype).clone())
        prepared = FP8.prepare(far, request)
        assert FragmentLayout.parse(prepared.constants["layout"]).folds is folds
        assert_close(FP8.run(x, prepared, None), expected(x, far, request.key, None, FP8), "bf16")


def test_a_group_of_zeros_may_have_any_scale() -> None:
    """Its scale is no reason to leave the others outside, and does not reach into theirs."""
    record = layer(KEYS["MXFP4 AF8"], 8, 128)
    scales = torch.full((8, 4), 120, dtype=torch.uint8)
    scales[:, 1], scales[2, 3] = 1, 254
    codes = record["codes"].clone().view(torch.uint8)
    codes[:, 32:64], codes[2, 96:] = 0, 8
    record = record.with_tensors(codes=codes.view(record["codes"].dtype), scale=scales.view(record["scale"].dtype))
    request = LinearRequest.of(record, KEYS["MXFP4 AF8"])
    fragment_layout, product_layout = fragment_layout_of(request, "e4m3"), product_layout_of(request, "e4m3")
    assert fragment_layout is not None
    assert product_layout is not None
    assert can_fold(record)
    tensors = fragment_tensors(record, fragment_layout)
    assert torch.equal(fragment_numbers(tensors["weight"], fragment_layout, tensors["row_scale"]), dequantize(record))
    assert torch.equal(
        product_numbers(product_tensors(record, product_layout, False), product_layout), dequantize(record)
    )


def test_a_code_out_of_range_is_not_packed() -> None:
    record = layer(KEYS["W4A16"], 32, 128)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4A16"]))
    assert layout is not None
    codes = record["codes"].clone()
    codes[3, 5] = 8
    with pytest.raises(CheckpointError, match="int4"):
        fragment_tensors(record.with_tensors(codes=codes), layout)


@pytest.mark.parametrize("tokens", [(0,), (), (3,), (2, 300)])
def test_without_a_gpu_the_layout_is_multiplied_all_the_same(tokens: tuple[int, ...]) -> None:
    record = layer(KEYS["W4A16 asym g32"], 40, 96)
    request = LinearRequest.of(record, KEYS["W4A16 asym g32"])
    x, bias = inputs((*tokens, 96), torch.bfloat16), torch.randn(40).bfloat16()
    y = KERNEL.run(x, KERNEL.prepare(record, request), bias)
    assert_close(y, expected(x, record, request.key, bias, KERNEL), "bf16")


DECODINGS = [
    *(Decoding(group, True, "bf16", "bf16") for group in (32, 64, 128)),
    *(Decoding(group, False, "bf16", "e4m3") for group in (32, 64, 128)),
    *(Decoding(group, False, "bf16", "bf16", "e2m1", True) for group in (16, 32)),
    *(Decoding(32, False, "bf16", "e4m3", "e2m1", folds) for folds in (False, True)),
    *(Decoding(group, False, "bf16", "bf16", "int8") for group in (0, 32)),
    Decoding(0, False, "bf16", "bf16", "e4m3"),
]


@pytest.mark.parametrize("device", ["NVIDIA H200", "another device"])
@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (28672, 4096), (64, 128)])
def test_cuts_fit_the_multiprocessor(rows: int, columns: int, decoding: Decoding, device: str) -> None:
    layout = FragmentLayout(rows, columns, offset=0, **asdict(decoding))
    for tokens in (1, 9, 16, 17, 64, 65, 128, 200, 256, 512, 2000, 5000):
        cut = cut_for(layout, tokens, device)
        if isinstance(cut, RowCut):
            assert cut.tokens >= tokens
            continue
        assert cut.decodes_first or cut.shared_bytes(layout) <= cut.shared_limit
        assert cut.decodes_first or cut.stages >= FEWEST_STAGES
        assert cut.blocks <= cut.residents


def test_sources_and_their_macros_go_with_each_other() -> None:
    """Every name in capitals that a source uses and does not define is given by the launcher."""
    for decoding in DECODINGS:
        assert asked([*decoding_files(decoding), "decode.cu"]) <= set(macros_of(decoding))
        assert asked(product_files(decoding)) == set(macros_of(decoding, Cut(64)))


def test_the_launcher_and_the_kernel_mean_the_same_struct() -> None:
    assert fields_of_problem("fragment_problem.cuh") == [name for name, _ in Problem._fields_]
    assert ctypes.sizeof(Problem) == 7 * 8 + 10 * 4


def test_a_compiled_kernel_is_kept_and_a_broken_one_is_not_used(tmp_path) -> None:
    path = tmp_path / "deeper" / "entry.cubin"
    assert read_entry(path) is None
    write_entry(path, b"machine code")
    assert read_entry(path) == b"machine code"
    assert [entry.name for entry in path.parent.iterdir()] == ["entry.cubin"]
    whole = path.read_bytes()
    for broken in (whole[:-1], whole[:20], b"", whole[:-1] + b"X"):
        path.write_bytes(broken)
        assert read_entry(path) is None
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    write_entry(blocked / "entry.cubin", b"machine code")
    assert read_entry(blocked / "entry.cubin") is None
