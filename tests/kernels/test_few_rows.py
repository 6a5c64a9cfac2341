"""Products of few rows over weight fragments: the arithmetic, the cuts, the launch, what the sources ask for."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import KernelError
from fewbit.kernels.cuda import few_rows
from fewbit.kernels.cuda.few_rows import RowProblem
from fewbit.kernels.cuda.products import decoding_files, macros_of
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.fragment_layout import DEPTH, ROWS, Decoding, FragmentLayout, fragment_layout_of
from fewbit.kernels.linear.fragment_tensors import fragment_tensors
from fewbit.kernels.linear.row_cuts import SHARED_LIMIT, row_cut_by_rule, row_cut_candidates
from tests.kernels.cuda_sources import asked, fields_of_problem
from tests.kernels.layers import KEYS, layer


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
    words = (
        fragment_tensors(record, layout)["weight"][0, 0, : layout.code_bytes]
        .contiguous()
        .view(torch.int32)
        .view(2, 4, 8, 4, 4)
    )
    words = words.permute(1, 2, 0, 4, 3).reshape(4, 8, 8, 4).long() & 0xFFFFFFFF  # warp, row of eight, step, thread
    for odd in (0, 1):
        codes = (words[..., None] >> 4 * odd & 0x0F0F0F0F) >> 8 * torch.arange(4) & 0xFF
        sums = torch.einsum("wrstb,dstb->dwr", codes.double(), digits[:, order].double())
        wanted = (record["codes"].double() + 8).view(4, 8, 2, DEPTH)[:, :, odd] @ digits.double().T
        assert torch.equal(sums.permute(1, 2, 0), wanted)


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
    assert len(launched) == 1
    blocks, problem, stream = launched[0]
    assert (blocks, stream) == (cut.launched(layout), 7)
    assert (problem.weight, problem.bias, problem.x % 16) == (weight.data_ptr(), bias.data_ptr(), 0)
    numbers = (problem.tokens, problem.rows, problem.columns, problem.stride, problem.tiles, problem.depths)
    assert numbers == (3, 1001, 1096, 1002, 64, 9)


def test_sources_of_few_rows_ask_for_what_their_launcher_gives() -> None:
    decoding = Decoding(64, False, "bf16", "bf16")
    cut = {"TILES", "ROW_WARPS", "DEPTH_WARPS", "STAGES", "EARLY", "CLUSTER"}
    given = macros_of(decoding).keys() - {"ROW_SCALED"} | cut
    sources = [*decoding_files(decoding), "few_rows.cuh"]
    assert asked([*sources, "few_digits.cuh", "few_rows.cu"]) == given | {"TOKENS"}
    assert asked([*sources, "few_floats.cuh", "few_rows.cu"]) == given
    assert fields_of_problem("few_rows.cuh") == [name for name, _ in RowProblem._fields_]
    assert ctypes.sizeof(RowProblem) == 4 * 8 + 6 * 4


def test_more_rows_than_a_cut_has_room_for_are_refused() -> None:
    layout = FragmentLayout(64, 128, 128, "bf16", 8, False, "bf16")
    cut = row_cut_by_rule(layout, 1)
    assert cut is not None
    with pytest.raises(KernelError, match="for 1 rows"):
        few_rows.multiply(torch.zeros(2, 128).bfloat16(), torch.zeros(1, dtype=torch.uint8), None, layout, cut)
