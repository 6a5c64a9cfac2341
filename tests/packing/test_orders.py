"""Words in another order against a plain loop, and against what Quark and AutoAWQ stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import ShapeError
from fewbit.packing.registry import packings
from fewbit.spec import ELEMENTS, Layout
from tests.golden import ids, words

EVEN_THEN_ODD = [0, 2, 4, 6, 1, 3, 5, 7]


def order_of(name: str, count: int) -> list[int]:
    if name == "interleaved":
        return EVEN_THEN_ODD
    return list(range(count))[:: -1 if name == "reversed" else 1]


@given(
    name=st.sampled_from(["dense", "interleaved", "reversed"]),
    transposed=st.booleans(),
    bits=st.sampled_from([1, 2, 4, 8]),
    word_bits=st.sampled_from([8, 32]),
    axis=st.sampled_from(["N", "K"]),
    offset=st.sampled_from([0, 2, -1]),
    shape=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    seed=st.integers(0, 1 << 20),
)
def test_words_equal_a_plain_loop(
    name: str, transposed: bool, bits: int, word_bits: int, axis: str, offset: int, shape: tuple[int, int], seed: int
) -> None:
    layout, count = Layout(name, bits, axis, word_bits, offset, transposed), word_bits // bits
    packing = packings()[name]
    if name == "interleaved" and (bits, word_bits) != (4, 32):
        with pytest.raises(ShapeError, match=f"codes of {bits} bits"):
            packing.packed_shape(shape, layout)
        return
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = packing.pack(codes, layout)
    runs = codes if axis == "K" else codes.T
    expected = [
        [
            sum(
                ((run[word * count + code] + offset) % (1 << bits)) << (position * bits)
                for position, code in enumerate(order_of(name, count))
                if word * count + code < len(run)
            )
            for word in range(-(-len(run) // count))
        ]
        for run in runs.tolist()
    ]
    assert tuple(packed.shape) == packing.packed_shape(shape, layout)
    found = packed.T if transposed else packed
    found = found if axis == "K" else found.T
    assert [[word % (1 << word_bits) for word in run] for run in found.tolist()] == expected


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_widths_that_straddle_words_have_no_order(bits: int) -> None:
    with pytest.raises(ShapeError, match=f"hold codes of {bits} bits"):
        packings()["reversed"].packed_shape((64, 64), Layout("reversed", bits, "N", 32))


@pytest.mark.parametrize("name", [name for name in ids("quark_") if "_per_" in name])
def test_golden_quark_four_bits(name: str, golden: dict[str, Any]) -> None:
    vector, element = golden[name], ELEMENTS[name.split("_")[1]]
    grouped = vector["qscheme"] == "per_group"
    kind = "interleaved" if vector["reorder"] else "dense"
    codes = torch.tensor(vector["codes_out_in"], dtype=torch.int8 if element.signed else torch.uint8)
    layout = Layout(kind, 4, "N" if grouped else "K", 32, transposed=grouped)
    packed = packings()[kind].pack(codes, layout)
    assert torch.equal(packed, words(vector["weight_int32"]))
    assert torch.equal(packings()[kind].unpack(packed, layout, element, tuple(codes.shape)), codes)


def test_golden_quark_two_bits(golden: dict[str, Any]) -> None:
    vector, layout = golden["quark_uint2"], Layout("reversed", 2, "N", 8, transposed=True)
    codes = torch.tensor(vector["codes_out_in"], dtype=torch.uint8)
    packing = packings()["reversed"]
    assert packing.pack(codes, layout).tolist() == vector["weight_uint8_transposed"]
    stored = torch.tensor(vector["weight_uint8_transposed"], dtype=torch.uint8)
    assert torch.equal(packing.unpack(stored, layout, ELEMENTS["uint2"], tuple(codes.shape)), codes)


def test_golden_tiny(golden: dict[str, Any]) -> None:
    vector = golden["tiny_int4_awq"]
    codes, word = torch.tensor([vector["codes"]], dtype=torch.uint8), words([[vector["int32"]]])
    assert torch.equal(packings()["interleaved"].pack(codes, Layout("interleaved", 4, "K", 32)), word)


def test_golden_awq_codes_and_zero_points_in_one_order(golden: dict[str, Any]) -> None:
    """B26: zero points that differ from column to column follow the interleave as the codes do."""
    vector, layout = golden["awq_gemm_int4"], Layout("interleaved", 4, "N", 32, transposed=True)
    packing = packings()["interleaved"]
    for field, packed in (("codes_in_out", "qweight"), ("zeros_group_out", "qzeros")):
        codes = torch.tensor(vector[field], dtype=torch.uint8).T.contiguous()
        assert torch.equal(packing.pack(codes, layout), words(vector[packed]))
        assert torch.equal(packing.unpack(words(vector[packed]), layout, ELEMENTS["uint4"], tuple(codes.shape)), codes)
