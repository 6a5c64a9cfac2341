"""Layouts and tensor specs: shapes on disk, and which slice a rank holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.errors import ShapeError
from fewbit.spec import PLAIN, Extent, Layout, TensorSpec
from fewbit.spec.layout import COLUMNS, ONE, ROWS


def _words(axis: str, bits: int, width: int = 32) -> Extent:
    return Extent(axis, bits, width)


SPECS = {
    "codes along K": TensorSpec("codes", "w", (ROWS, _words("K", 4)), "int32"),
    "3-bit codes along K": TensorSpec("codes", "w", (ROWS, _words("K", 3)), "int32"),
    "transposed codes": TensorSpec("codes", "w", (_words("K", 4), ROWS), "int32"),
    "pairs": TensorSpec("codes", "w", (ROWS, _words("K", 4, 8)), "uint8"),
    "group scales": TensorSpec("scale", "s", (ROWS, Extent("K", 1, 128)), None),
    "channel scales": TensorSpec("scale", "s", (ROWS, ONE), None),
    "block scales": TensorSpec("scale", "s", (Extent("N", 1, 128), Extent("K", 1, 128)), None),
    "zero points along N": TensorSpec("zero_point", "z", (_words("N", 4), Extent("K", 1, 128)), "int32"),
    "tensor scale": TensorSpec("global_scale", "g", (ONE,), "float32"),
    "order": TensorSpec("order", "o", (COLUMNS,), "int32"),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("codes along K", (512, 128)),
        ("3-bit codes along K", (512, 96)),
        ("transposed codes", (128, 512)),
        ("pairs", (512, 512)),
        ("group scales", (512, 8)),
        ("channel scales", (512, 1)),
        ("block scales", (4, 8)),
        ("zero points along N", (64, 8)),
        ("tensor scale", (1,)),
        ("order", (1024,)),
    ],
)
def test_shape_of(name: str, shape: tuple[int, ...]) -> None:
    assert SPECS[name].shape_of(512, 1024) == shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("codes along K", (130, 26)),  # 201 codes of 4 bits need 804 bits
        ("3-bit codes along K", (130, 19)),
        ("group scales", (130, 2)),
        ("block scales", (2, 2)),
        ("zero points along N", (17, 2)),
    ],
)
def test_shape_of_a_ragged_layer_rounds_up(name: str, shape: tuple[int, ...]) -> None:
    assert SPECS[name].shape_of(130, 201) == shape


@pytest.mark.parametrize(
    ("factor", "divisor", "quantum"), [(1, 1, 1), (4, 32, 8), (3, 32, 32), (6, 32, 16), (8, 32, 4), (1, 128, 128)]
)
def test_quantum_is_the_smallest_separable_piece(factor: int, divisor: int, quantum: int) -> None:
    assert Extent("K", factor, divisor).quantum == quantum


@pytest.mark.parametrize(
    ("name", "axis", "expected"),
    [
        ("codes along K", "N", (0, 128, 128)),
        ("codes along K", "K", (1, 32, 32)),
        ("3-bit codes along K", "K", (1, 24, 24)),
        ("transposed codes", "K", (0, 32, 32)),
        ("transposed codes", "N", (1, 128, 128)),
        ("group scales", "K", (1, 2, 2)),
        ("channel scales", "K", None),  # every rank needs all of it
        ("channel scales", "N", (0, 128, 128)),
        ("block scales", "N", (0, 1, 1)),
        ("zero points along N", "N", (0, 16, 16)),
        ("tensor scale", "N", None),
        ("order", "N", None),
        ("order", "K", (0, 256, 256)),
    ],
)
def test_shard_of_rank_1_of_4(name: str, axis: str, expected: tuple[int, int, int] | None) -> None:
    assert SPECS[name].shard(axis, 512 if axis == "N" else 1024, 1, 4) == expected


@given(
    name=st.sampled_from(sorted(SPECS)),
    axis=st.sampled_from(["N", "K"]),
    pieces=st.integers(1, 6),
    world=st.integers(1, 6),
)
def test_shards_tile_the_tensor(name: str, axis: str, pieces: int, world: int) -> None:
    spec, extent = SPECS[name], 128 * pieces * world  # 128 is a multiple of every quantum above
    whole = spec.shape_of(extent, extent)
    shards = [spec.shard(axis, extent, rank, world) for rank in range(world)]
    if None in shards:
        assert set(shards) == {None}
        assert all(stored.axis != axis for stored in spec.shape)
        return
    ends = 0
    for _, start, length in shards:
        assert start == ends
        ends = start + length
    assert ends == whole[shards[0][0]]


@pytest.mark.parametrize(
    ("name", "axis", "extent", "world"),
    [
        ("codes along K", "K", 40, 2),  # 20 codes of 4 bits end within a word
        ("3-bit codes along K", "K", 96, 2),
        ("group scales", "K", 2880, 4),
        ("block scales", "N", 192, 2),
        ("codes along K", "N", 130, 4),
    ],
)
def test_a_cut_through_a_word_or_group_is_refused(name: str, axis: str, extent: int, world: int) -> None:
    with pytest.raises(ShapeError) as caught:
        SPECS[name].shard(axis, extent, 0, world)
    assert str(extent) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", sorted(SPECS))
@pytest.mark.parametrize("axis", ["N", "K"])
def test_one_rank_holds_everything_however_ragged(name: str, axis: str) -> None:
    shard = SPECS[name].shard(axis, 201, 0, 1)
    if shard is not None:
        position, start, length = shard
        assert (start, length) == (0, SPECS[name].shape_of(201, 201)[position])


def test_the_text_form_tells_layouts_apart() -> None:
    layouts = [
        PLAIN,
        Layout("dense", 4, "K", 32, 8),
        Layout("dense", 4, "K", 32),
        Layout("dense", 4, "N", 32),
        Layout("dense", 4, "K", 8),
        Layout("dense", 3, "K", 8),
        Layout("dense", 3, "K", 8, transposed=True),
    ]
    assert len({str(layout) for layout in layouts}) == len(layouts)
    assert str(PLAIN) == "plain"


@pytest.mark.parametrize(
    ("extent", "features", "size", "quantum"),
    [
        (Extent("K", 1, 64, multiple=16), 256, 16, 1024),  # 4 groups, padded
        (Extent("K", 1, 64, multiple=16), 1025, 32, 1024),
        (Extent("K", 6, 32, multiple=6), 64, 12, 32),  # runs of 32 codes in 6 words
        (Extent("K", 6, 32), 64, 12, 16),
        (Extent("N", 2, 1, multiple=128), 192, 384, 64),  # tiles of 64 rows in 128 words
        (Extent("K", multiple=64), 64, 64, 64),
    ],
)
def test_an_extent_is_padded_to_its_multiple_and_not_cut_inside_one(
    extent: Extent, features: int, size: int, quantum: int
) -> None:
    assert extent.size(features, features) == size
    assert extent.quantum == quantum


def test_an_axis_that_cannot_be_split() -> None:
    spec = TensorSpec("scale", "scales", (Extent("K", 1, 4, divisible=False), ROWS), None)
    assert spec.shard("K", 16, 0, 1) == (0, 0, 4)
    assert spec.shard("N", 16, 1, 2) == (1, 8, 8)
    with pytest.raises(ShapeError, match="scales cannot be split along K"):
        spec.shard("K", 16, 0, 2)


def test_tensors_whose_order_mixes_the_axes_are_not_cut() -> None:
    spec = TensorSpec("codes", "weight", (Extent("N", 32, 2), ONE), "uint8", uncut=("K",))
    assert spec.shard("N", 8, 1, 2) == (0, 64, 64)
    assert spec.shard("K", 32, 0, 1) is None
    with pytest.raises(ShapeError, match="weight cannot be split along K"):
        spec.shard("K", 32, 0, 2)


def test_tensors_of_any_shape() -> None:
    spec = TensorSpec("state", "note", None, "uint8")
    assert spec.shape_of(8, 32) == ()
    assert spec.shard("N", 8, 0, 2) is None
