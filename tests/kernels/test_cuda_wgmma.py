"""Weight fragments: the layout against what the tensor cores take, the record, and the sources that read it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import CheckpointError
from fewbit.kernels.cuda import few_rows
from fewbit.kernels.cuda.compiler import read_entry, write_entry
from fewbit.kernels.cuda.few_rows import RowProblem
from fewbit.kernels.cuda.products import FLOATS, SOURCES, Problem
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.cuda_wgmma import CudaWgmma
from fewbit.kernels.linear.cuda_wgmma_fp8 import CudaWgmmaFp8
from fewbit.kernels.linear.fragment_cuts import cut_for
from fewbit.kernels.linear.fragment_layout import (
    CODE_BYTES,
    DEPTH,
    ROWS,
    FragmentLayout,
    fragment_layout_of,
    fragment_numbers,
    fragments,
)
from fewbit.kernels.linear.row_cuts import SHARED_LIMIT, RowCut, row_cut_by_rule, row_cut_candidates
from fewbit.numerics import dequantize
from fewbit.spec import DEVICES
from tests.kernels.cuda_sources import asked, fields_of_problem
from tests.kernels.layers import KEYS, assert_close, expected, inputs, layer

KERNEL, FP8 = CudaWgmma(), CudaWgmmaFp8()
H200 = DEVICES["sm90"].with_software("cuda-core")
TAKEN = [name for name, key in KEYS.items() if KERNEL.refuse(LinearRequest(key, 64, 256), H200) is None]


TAKEN_FP8 = [name for name, key in KEYS.items() if FP8.refuse(LinearRequest(key, 64, 256), H200) is None]


def test_what_fragments_take() -> None:
    wanted = {"W4A16", "W4A16_ASYM", "W3A16", "W2A16 unsigned asym", "W4A16 unsigned", "W4A16 g256", "W4A16 channel"}
    assert wanted <= set(TAKEN)
    assert not {"W4A16 g16", "W5A16", "W8A16", "NVFP4A16", "W4A16 biased", "W4A16 signed asym"} & set(TAKEN)
    assert TAKEN_FP8 == ["W4AF8 g128", "W4AF8 static"]


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
    weight = fragments(record, layout)
    assert (weight.nbytes, weight.shape) == (layout.nbytes, (layout.units, layout.depths, layout.unit_bytes))
    assert torch.equal(fragment_numbers(weight, layout), dequantize(record).bfloat16().float())
    assert FragmentLayout.parse(str(layout)) == layout


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (96, 256), (1, 128), (200, 1152)])
@pytest.mark.parametrize("name", TAKEN_FP8)
def test_fragments_for_fp8_stand_for_the_numbers_of_the_record(name: str, rows: int, columns: int) -> None:
    record = layer(KEYS[name], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS[name]), "e4m3")
    assert layout is not None
    assert torch.equal(fragment_numbers(fragments(record, layout), layout), dequantize(record))


@given(st.data())
def test_a_thread_decodes_its_share_of_the_left_operand_to_e4m3(data: st.DataObject) -> None:
    """By the register layout of 8-bit `wgmma`, with the arithmetic of `decode_e4m3`."""
    rows, columns = data.draw(st.integers(1, 150)), 16 * data.draw(st.integers(1, 20))
    record = layer(KEYS["W4AF8 static"], rows, columns)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4AF8 static"]), "e4m3")
    assert layout is not None
    words = fragments(record, layout)[..., :CODE_BYTES].contiguous().view(torch.int32)
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
    words = fragments(record, layout)[..., :CODE_BYTES].contiguous().view(torch.int32)
    unit, depth = (data.draw(st.integers(0, count - 1)) for count in (layout.units, layout.depths))
    warp, lane, step = (data.draw(st.integers(0, last)) for last in (3, 31, 7))
    register, half = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 1))
    word = int(words[unit, depth, step // 4 * 512 + (warp * 32 + lane) * 4 + step % 4]) & 0xFFFFFFFF
    found = word >> (4 * register) >> (16 * half) & 15
    row = unit * ROWS + warp * 16 + lane // 4 * 2 + register % 2
    column = depth * DEPTH + step * 16 + register // 2 * 8 + lane % 4 * 2 + half
    inside = row < rows and column < columns
    assert found == (int(record["codes"][row, column]) + 8 if inside else 0)


@given(st.integers(0, 2**32 - 1), st.integers(-60, 60))
def test_digits_of_x_meet_the_codes_of_their_input_features(seed: int, power: int) -> None:
    """With the arithmetic of `split_into_digits` and the register layout of integer products 32 input features deep."""
    generator = torch.Generator().manual_seed(seed)
    record = layer(KEYS["W4A16 channel"], ROWS, DEPTH)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4A16 channel"]))
    assert layout is not None
    x = (
        torch.randn(DEPTH, generator=generator) * torch.randn(DEPTH, generator=generator).exp() * 2.0**power
    ).bfloat16()
    exponent = int(x.abs().max().float().view(torch.int32)) >> 23
    numbers = torch.round(x.double() * 2.0 ** (127 + 21 - exponent)).long()
    assert (
        numbers.double() * 2.0 ** (exponent - 127 - 21) - x.double()
    ).abs().max() <= x.double().abs().max() * 2.0**-22
    above = numbers + 128 >> 8
    digits = ((numbers + 0x8080) ^ 0x8080) >> torch.tensor([[16], [8], [0]]) & 0xFF
    digits = torch.where(digits < 128, digits, digits - 256)
    assert torch.equal(digits[0] * 256 + digits[1], above)
    assert torch.equal(above * 256 + digits[2], numbers)
    features = torch.arange(DEPTH)
    step, place = features // 16, features % 16
    order = torch.empty(8, 4, 4, dtype=torch.long)  # input feature of each byte of word `step` of a thread of four
    order[step, place % 8 // 2, place % 2 * 2 + place // 8] = features
    words = fragments(record, layout)[0, 0, :CODE_BYTES].contiguous().view(torch.int32).view(2, 4, 8, 4, 4)
    words = words.permute(1, 2, 0, 4, 3).reshape(4, 8, 8, 4).long() & 0xFFFFFFFF  # warp, row of eight, step, thread
    for odd in (0, 1):
        codes = (words[..., None] >> 4 * odd & 0x0F0F0F0F) >> 8 * torch.arange(4) & 0xFF
        sums = torch.einsum("wrstb,dstb->dwr", codes.double(), digits[:, order].double())
        wanted = (record["codes"].double() + 8).view(4, 8, 2, DEPTH)[:, :, odd] @ digits.double().T
        assert torch.equal(sums.permute(1, 2, 0), wanted)


def test_a_code_out_of_range_is_not_packed() -> None:
    record = layer(KEYS["W4A16"], 32, 128)
    layout = fragment_layout_of(LinearRequest.of(record, KEYS["W4A16"]))
    assert layout is not None
    codes = record["codes"].clone()
    codes[3, 5] = 8
    with pytest.raises(CheckpointError, match="int4"):
        fragments(record.with_tensors(codes=codes), layout)


@pytest.mark.parametrize("tokens", [(0,), (), (3,), (2, 300)])
def test_without_a_gpu_the_layout_is_multiplied_all_the_same(tokens: tuple[int, ...]) -> None:
    record = layer(KEYS["W4A16 asym g32"], 40, 96)
    request = LinearRequest.of(record, KEYS["W4A16 asym g32"])
    x, bias = inputs((*tokens, 96), torch.bfloat16), torch.randn(40).bfloat16()
    y = KERNEL.run(x, KERNEL.prepare(record, request), bias)
    assert_close(y, expected(x, record, request.key, bias, KERNEL), "bf16")


@pytest.mark.parametrize("device", ["NVIDIA H200", "another device"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("operand", ["bf16", "e4m3"])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (28672, 4096), (64, 128)])
def test_cuts_fit_the_multiprocessor(rows: int, columns: int, operand: str, group: int, device: str) -> None:
    layout = FragmentLayout(rows, columns, group, "bf16", 0, operand == "bf16", operand)
    for tokens in (1, 9, 16, 17, 64, 65, 128, 200, 256, 512, 2000, 5000):
        cut = cut_for(layout, tokens, device)
        if isinstance(cut, RowCut):
            assert cut.tokens >= tokens
            continue
        assert cut.decodes_first or cut.shared_bytes(layout) <= cut.shared_limit
        assert cut.stages >= 2
        assert cut.blocks <= cut.residents


@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 32), (4096, 4096), (4096, 14336), (28672, 4096), (128256, 8192), (16384, 53248)]
)
@pytest.mark.parametrize(("group", "has_zero"), [(128, False), (32, True)])
def test_a_cut_of_rows_covers_the_layer(rows: int, columns: int, group: int, has_zero: bool) -> None:
    layout = FragmentLayout(rows, columns, group, "bf16", 8, has_zero, "bf16")
    for tokens in range(1, 18):
        rule = row_cut_by_rule(layout, tokens)
        assert tokens <= 8 or rule is None
        cuts = [*([] if rule is None else [rule]), *row_cut_candidates(layout, tokens)]
        assert cuts or tokens > 8 or columns > 16384
        for cut in cuts:
            assert tokens <= cut.tokens <= 8
            assert cut.launched(layout) * cut.tiles * cut.row_warps * 16 >= rows * cut.cluster
            assert cut.launched(layout) % cut.cluster == 0
            assert cut.shared_bytes(layout) <= SHARED_LIMIT
            assert 1 <= cut.early <= cut.stages
            assert cut.threads <= 512
            assert cut.depth_warps * cut.cluster <= layout.depths


def test_a_weight_whose_bytes_32_bits_do_not_count_is_not_cut_so() -> None:
    layout = FragmentLayout(1 << 20, 8192, 128, "bf16", 8, False, "bf16")
    assert row_cut_by_rule(layout, 1) is None
    assert not list(row_cut_candidates(layout, 1))


def test_sources_and_their_macros_go_with_each_other() -> None:
    """Every name in capitals that a source uses and does not define is given by the launcher."""
    shared = [*SOURCES, "kernel.cu"]
    given = {"GROUP", "HAS_ZERO", "HALF"}
    assert asked([*FLOATS, "decode.cu"]) == given
    cut = {"TOKENS", "WARPGROUPS", "TILES", "STAGES", "CLUSTER", "RESIDENTS", "OPERAND_BYTES"}
    given |= cut | {"REGISTERS", "PRODUCER_REGISTERS"}
    assert asked([*shared, "weight_fp8.cuh"]) == given
    assert asked([*shared, "weight_only.cuh"]) == given | {"STEP", "AHEAD"}
    cut = {"TILES", "ROW_WARPS", "DEPTH_WARPS", "STAGES", "EARLY", "CLUSTER", "GROUP", "HAS_ZERO", "HALF"}
    assert asked([*FLOATS, "few_rows.cuh", "few_digits.cuh", "few_rows.cu"]) == cut | {"TOKENS"}
    assert asked([*FLOATS, "few_rows.cuh", "few_floats.cuh", "few_rows.cu"]) == cut


def test_a_launch_names_what_the_kernel_of_few_rows_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[int, RowProblem, int]] = []

    def launch(blocks: int, arguments: Any, stream: int) -> None:
        problem = RowProblem.from_buffer_copy(RowProblem.from_address(arguments[0]))
        launched.append((blocks, problem, stream))

    monkeypatch.setattr(few_rows, "_product", lambda *_: SimpleNamespace(launch=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    layout = FragmentLayout(1001, 1096, 128, "bf16", 8, False, "bf16")
    weight, bias = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.zeros(1001).bfloat16()
    cut = row_cut_by_rule(layout, 3)
    assert cut is not None
    x = torch.zeros(3 * 1096 + 1).bfloat16()[1:].view(3, 1096)  # the kernel takes rows of 16 bytes at multiples of 16
    y = few_rows.multiply(x, weight, bias, layout, cut)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((3, 1001), torch.bfloat16, True)
    ((blocks, problem, stream),) = launched
    assert (blocks, stream) == (cut.launched(layout), 7)
    assert (problem.weight, problem.bias, problem.x % 16) == (weight.data_ptr(), bias.data_ptr(), 0)
    numbers = (problem.tokens, problem.rows, problem.columns, problem.stride, problem.tiles, problem.depths)
    assert numbers == (3, 1001, 1096, 1002, 64, 9)


def test_the_launcher_and_the_kernel_mean_the_same_struct() -> None:
    assert fields_of_problem("fragment_problem.cuh") == [name for name, _ in Problem._fields_]
    assert fields_of_problem("few_rows.cuh") == [name for name, _ in RowProblem._fields_]
    assert ctypes.sizeof(RowProblem) == 4 * 8 + 6 * 4


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
