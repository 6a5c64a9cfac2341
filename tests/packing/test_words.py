"""Planar, interleaved, gemv_fast and Marlin words against their definitions written out one code at a time."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.packing.marlin import scale_order
from fewbit.packing.registry import packings
from fewbit.spec import ELEMENTS, Layout
from tests.golden import ids, words

PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 2: (2,), 4: (4,), 8: (8,)}


def random_codes(bits: int, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)


def bit_string(fields: list[int], bits: int) -> list[int]:
    """32-bit words of fields laid end to end."""
    whole = sum(field << (index * bits) for index, field in enumerate(fields))
    return [whole >> (32 * index) & 0xFFFFFFFF for index in range(-(-len(fields) * bits // 32))]


def unsigned(tensor: Tensor) -> list[Any]:
    return (tensor.long() & ((1 << (8 * tensor.element_size())) - 1)).tolist()


def assert_packs(codes: Tensor, stored: Tensor, layout: Layout) -> None:
    packing, element = packings()[layout.packing], ELEMENTS[f"uint{layout.bits}"]
    assert torch.equal(packing.pack(codes, layout), stored)
    assert torch.equal(packing.unpack(stored, layout, element, tuple(codes.shape)), codes)


# --- planar ----------------------------------------------------------------------------------------------------------


@given(bits=st.sampled_from(sorted(PLANES)), runs=st.integers(1, 4), seed=st.integers(0, 999))
def test_planar_words_are_planes_one_after_the_other(bits: int, runs: int, seed: int) -> None:
    codes = random_codes(bits, 1, 32 * runs, seed=seed)
    expected = []
    for run in range(runs):
        fields, below = codes[0, 32 * run : 32 * run + 32].tolist(), 0
        for width in PLANES[bits]:
            expected += bit_string([field >> below & ((1 << width) - 1) for field in fields], width)
            below += width
    assert unsigned(packings()["planar"].pack(codes, Layout("planar", bits, "K", 32)))[0] == expected


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_planar_is_dense_where_one_plane_holds_a_code(bits: int) -> None:
    codes = random_codes(bits, 3, 64)
    planar, dense = (packings()[name].pack(codes, Layout(name, bits, "K", 32)) for name in ("planar", "dense"))
    assert torch.equal(planar, dense)


@pytest.mark.parametrize("name", [name for name in ids("tiny_") if name.endswith("_planar")])
def test_golden_planar_examples(name: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    bits = len(vector["int32"])
    codes = torch.tensor([vector["codes"]], dtype=torch.uint8)
    assert_packs(codes, words([vector["int32"]]), Layout("planar", bits, "K", 32))


@pytest.mark.parametrize("shape", [(8, 33), (8, 16)])
def test_planar_runs_are_whole(shape: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match=f"runs of 32 codes, found {shape[1]} along K"):
        packings()["planar"].packed_shape(shape, Layout("planar", 3, "K", 32))


# --- interleaved -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_an_interleaved_word_has_even_codes_in_its_low_half(codes: list[int]) -> None:
    expected = bit_string([*codes[::2], *codes[1::2]], 4)
    packed = packings()["interleaved"].pack(torch.tensor([codes], dtype=torch.uint8), Layout("interleaved", 4, "K", 32))
    assert unsigned(packed)[0] == expected


def test_golden_interleaved_example(golden: dict[str, Any]) -> None:
    vector = golden["tiny_int4_awq"]
    codes, expected = torch.tensor(vector["codes"], dtype=torch.uint8), words([[vector["int32"]]])
    assert_packs(codes[None], expected, Layout("interleaved", 4, "K", 32))
    # Along N and transposed, as AWQ has it: [K, N/8].
    assert_packs(codes[:, None], expected, Layout("interleaved", 4, "N", 32, transposed=True))


# --- gemv_fast -------------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 3), columns=st.integers(1, 3), seed=st.integers(0, 999))
def test_every_code_has_its_place_in_gemv_fast_words(rows: int, columns: int, seed: int) -> None:
    codes = random_codes(4, 4 * rows, 64 * columns, seed=seed)
    packed = unsigned(packings()["gemv_fast"].pack(codes, Layout("gemv_fast", 4, "K", 16)))
    for n in range(4 * rows):
        for k in range(64 * columns):
            half, a, b, c = k % 64 // 32, k % 32 // 8, k % 8 // 2, k % 2
            word = k // 64 * 64 + n % 4 * 16 + half * 8 + b * 2 + c
            assert packed[n // 4][word] >> (4 * a) & 15 == codes[n, k]


@pytest.mark.parametrize("shape", [(6, 64), (8, 96)])
def test_gemv_fast_shapes(shape: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="multiples of 4 and 64"):
        packings()["gemv_fast"].packed_shape(shape, Layout("gemv_fast", 4, "K", 16))


# --- Marlin ----------------------------------------------------------------------------------------------------------


def test_golden_marlin_tiles(golden: dict[str, Any]) -> None:
    vector = golden["awq_marlin_int4"]
    codes = torch.from_numpy(np.random.default_rng(6).integers(0, 16, (64, 256))).to(torch.uint8).T.contiguous()
    layout = Layout("marlin", 4, "K", 32, transposed=True)
    packed = packings()["marlin"].pack(codes, layout)
    assert list(packed.shape) == vector["qweight_shape"]
    assert torch.equal(packed[0, :16], words(vector["qweight_first_row_first_16"]))
    assert hashlib.sha256(packed.numpy().tobytes()).hexdigest() == vector["qweight_sha256_little_endian_int32"]
    assert torch.equal(packings()["marlin"].unpack(packed, layout, ELEMENTS["uint4"], (256, 64)), codes)


@pytest.mark.parametrize("shape", [(32, 64), (64, 24)])
def test_marlin_shapes(shape: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="multiples of 64 and 16"):
        packings()["marlin"].packed_shape(shape, Layout("marlin", 4, "K", 32, transposed=True))


def test_marlin_scales_in_groups_and_per_channel_take_different_orders() -> None:
    """B34: a lane wants the scales of its own columns together, and those differ where one scale serves all of K."""
    assert scale_order(grouped=True)[:10].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    assert scale_order(grouped=False)[:10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    for grouped in (True, False):
        assert sorted(scale_order(grouped).tolist()) == list(range(64 if grouped else 32))


@pytest.mark.parametrize("name", ["interleaved", "gemv_fast", "marlin", "planar"])
@pytest.mark.parametrize("layout", [{"bits": 9}, {"word_bits": 64}, {"word_bits": 8}])
def test_layouts_that_a_packing_does_not_have(name: str, layout: dict[str, int]) -> None:
    with pytest.raises(ShapeError):
        packings()[name].packed_shape((128, 128), Layout(name, **{"bits": 4, "axis": "K", "word_bits": 32} | layout))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (0, 64, 64), (2, 0, 64)])
@pytest.mark.parametrize(
    "layout",
    [
        Layout("planar", 3, "K", 32),
        Layout("interleaved", 4, "N", 32, transposed=True),
        Layout("gemv_fast", 4, "K", 16),
        Layout("marlin", 4, "K", 32, transposed=True),
    ],
    ids=str,
)
def test_empty_tensors(layout: Layout, shape: tuple[int, ...]) -> None:
    packing = packings()[layout.packing]
    codes = torch.empty(shape, dtype=torch.uint8)
    packed = packing.pack(codes, layout)
    assert tuple(packed.shape) == packing.packed_shape(shape, layout)
    assert packing.unpack(packed, layout, ELEMENTS[f"uint{layout.bits}"], shape).shape == shape
