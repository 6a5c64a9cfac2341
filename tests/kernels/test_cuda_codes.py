"""Products of 8-bit codes in CUDA C++: what is taken, how it is cut, and the sources."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.kernels.cuda.code_products import SOURCES, Problem, _Grid
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.code_cuts import FEW, TALLEST, CodeCut, block_rows, code_cut_by_rule, code_cut_for, group_cut
from fewbit.kernels.linear.cuda_fp8 import CudaFp8
from fewbit.kernels.linear.cuda_int8 import CudaInt8
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of, product_numbers, product_tensors
from fewbit.kernels.linear.tile_plans import MULTIPROCESSORS
from fewbit.kernels.tuned.code_cuts import code_cut_candidates
from fewbit.packing.registry import unpack_record
from fewbit.spec import DEVICES
from tests.kernels.cuda_sources import asked, fields_of_problem
from tests.kernels.layers import KEYS, layer

H200 = DEVICES["sm90"].with_software("cuda-core", "triton")


def test_what_is_taken() -> None:
    def taken(kernel: object) -> list[str]:
        return [name for name, key in KEYS.items() if kernel.refuse(LinearRequest(key, 64, 256), H200) is None]

    assert taken(CudaFp8()) == ["FP8", "FP8_DYNAMIC", "FP8 channel static", "FP8 tensor per token"]
    integers = ["W8A8", "W8A8 f32 scales", "W8A8 static", "W8A8 asym", "W8A8 asym unsigned", "W8A8 asym static"]
    assert taken(CudaInt8()) == integers


@pytest.mark.parametrize(
    ("key", "request_of", "device", "words"),
    [
        ("FP8", {}, DEVICES["sm90"].with_software("triton"), "cuda-core"),
        ("FP8", {}, DEVICES["sm100"].with_software("cuda-core", "triton"), "10.0"),
        ("FP8", {}, H200, "same bits"),
        ("FP8_BLOCK", {}, H200, "one scale for each output feature"),
        ("W8A8", {}, H200, "activations of e4m3"),
        ("FP8", {"dtype": "f32"}, H200, "f32"),
    ],
)
def test_refusals_name_what_is_missing(key: str, request_of: dict, device: object, words: str) -> None:
    arguments = {"key": KEYS[key], "rows": 128, "columns": 512, "batch_invariant": words == "same bits"} | request_of
    refusal = CudaFp8().refuse(LinearRequest(**arguments), device)
    assert refusal is not None
    assert words in refusal.reason


LAYERS = [(4096, 4096), (28672, 4096), (6144, 4096), (4096, 14336), (16, 32), (33, 65), (128256, 4096)]


def assert_compilable(cut: CodeCut) -> None:
    """What `bytes.cu` demands of its macros."""
    assert cut.fitted() == cut
    assert cut.stages >= 2
    assert cut.rows % (8 if cut.rows <= 32 else 16) == 0
    assert cut.rows <= 256
    assert cut.tokens in (8, 16, 32) or cut.tokens == 64 * (1 if cut.tokens == FEW else cut.warpgroups)
    assert cut.lines * 4 % cut.split == 0
    assert (cut.rows if cut.shares_weight else cut.tokens) % (8 * cut.cluster) == 0


@pytest.mark.parametrize("operand", ["e4m3", "int8"])
@pytest.mark.parametrize(("rows", "columns"), LAYERS)
def test_cuts_are_what_the_kernel_can_be_compiled_for(rows: int, columns: int, operand: str) -> None:
    layout = ProductLayout(operand, "codes", rows, columns, 0, 0, "f32")
    for tokens in (1, 8, 9, 16, 17, 64, 65, 128, 200, 256, 512, 2000, 5000):
        chosen = {code_cut_for(layout, tokens, device) for device in ("NVIDIA H200", "another device")}
        candidates = list(code_cut_candidates(layout, tokens))
        assert len(set(candidates)) == len(candidates) > 1
        for cut in chosen | set(candidates):
            if not cut.elsewhere:
                assert_compilable(cut)


def test_cuts_come_from_the_table_where_the_shape_was_measured() -> None:
    layout = ProductLayout("e4m3", "codes", 28672, 4096, 0, 0, "f32")
    assert code_cut_for(layout, 3, "NVIDIA H200") == code_cut_for(layout, 4, "NVIDIA H200")
    assert code_cut_for(layout, 100_000, "NVIDIA H200").elsewhere
    assert not code_cut_for(replace(layout, operand="int8"), 100_000, "NVIDIA H200").elsewhere
    assert code_cut_for(layout, 1, "another device") == code_cut_by_rule(layout, 1)
    only = CodeCut(64)
    with code_cut_for.by(lambda *_: only):
        assert code_cut_for(layout, 1, "NVIDIA H200") == only
    assert code_cut_for(layout, 1, "NVIDIA H200") != only


@given(st.integers(1, 200_000), st.integers(1, 40))
def test_blocks_fill_the_device_without_a_turn_for_a_few(rows: int, token_tiles: int) -> None:
    height = block_rows(rows, token_tiles)
    blocks = -(-rows // height) * token_tiles
    turns = -(-blocks // MULTIPROCESSORS)
    assert turns <= -(-rows * token_tiles // (MULTIPROCESSORS * TALLEST)) + token_tiles
    assert 8 <= height <= TALLEST


@pytest.mark.parametrize("rows", [128, 4096, 6144, 28672])
def test_cuts_of_groups_fit(rows: int) -> None:
    for tokens in (1, 300, 1024, 4096):
        cut = group_cut(rows, tokens)
        assert cut.grouped
        assert cut.fitted() == cut
        assert cut.stages >= 3
        assert cut.rows == 64 * cut.warpgroups
        assert cut.tokens % cut.grouped_width == 0


def test_the_work_is_shared_out_evenly() -> None:
    layout = ProductLayout("e4m3", "codes", 4096, 14336, 0, 0, "f32")
    whole = _Grid.of(CodeCut(8, 32), 1, layout, 132)
    assert (whole.tiles, whole.clusters, whole.divides) == (128, 128, False)
    shared = _Grid.of(CodeCut(128, 128, warpgroups=2, cluster=2, shares_weight=True, whole=False), 256, layout, 66)
    assert (shared.tiles, shared.clusters, shared.parts, shared.divides) == (32, 64, 2, True)
    ranges = _Grid.of(CodeCut(128, 192, warpgroups=2, cluster=2, shares_weight=True, whole=False), 256, layout, 66)
    assert (ranges.parts, ranges.divides) == (1, True)
    assert ranges.clusters * -(-ranges.tiles * ranges.depths // ranges.clusters) >= ranges.tiles * ranges.depths


@pytest.mark.parametrize("name", ["W8A8 asym", "W8A8 asym static", "W8A8 asym unsigned", "W4A8 channel"])
def test_sums_of_rows_are_whole_numbers_that_zero_points_cancel_against(name: str) -> None:
    record = layer(KEYS[name], 48, 96)
    layout = product_layout_of(LinearRequest.of(record, KEYS[name]), "int8")
    assert layout is not None
    tensors = product_tensors(unpack_record(record), layout, True)
    sums = tensors["weight_sums"]
    assert torch.equal(sums, sums.round())
    ones = product_numbers(tensors, layout).double().sum(1)
    assert torch.allclose(sums.double() * tensors["row_scale"], ones, rtol=1e-6, atol=1e-6)


def test_sources_and_their_macros_go_with_each_other() -> None:
    """Every name in capitals that a source uses and does not define is given by the launcher."""
    given = {"TOKENS", "ROWS", "LINES", "STAGES", "WARPGROUPS", "CLUSTER", "SHARES_WEIGHT", "WHOLE"}
    given |= {"INTEGER", "HALF", "ZEROS", "REGISTERS", "FEEDER_REGISTERS"}
    assert asked([*SOURCES, "bytes.cu"]) == given
    assert asked([*SOURCES, "grouped.cu"]) == given - {"ZEROS"} | {"SCALE_WIDTH"}


def test_the_launcher_and_the_kernel_mean_the_same_struct() -> None:
    assert fields_of_problem("bytes.cuh") == [name for name, _ in Problem._fields_]
    assert ctypes.sizeof(Problem) == 9 * 8 + 10 * 4
