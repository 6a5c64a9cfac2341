"""Granularities as rectangles over the last two axes."""

from __future__ import annotations

import pytest

from fewbit.errors import SchemeError
from fewbit.spec import CHANNEL, HEAD, TENSOR, TOKEN, Granularity, block, group

ALL = [TENSOR, CHANNEL, TOKEN, HEAD, group(16), group(128), block(128, 128), block(4, 32), block(1, 1)]


@pytest.mark.parametrize(
    ("granularity", "shape", "expected"),
    [
        (TENSOR, (8, 64), (1, 1)),
        (CHANNEL, (8, 64), (8, 1)),
        (TOKEN, (3, 64), (3, 1)),
        (group(16), (8, 64), (8, 4)),
        (group(16), (8, 24), (8, 2)),  # a short last group
        (group(128), (8, 64), (8, 1)),  # a group longer than the row
        (block(128, 128), (130, 200), (2, 2)),
        (block(4, 32), (4, 32), (1, 1)),
        # stacked experts: the leading axes stay
        (TENSOR, (5, 8, 64), (5, 1, 1)),
        (HEAD, (2, 8, 40, 64), (2, 8, 1, 1)),
        (group(16), (5, 8, 24), (5, 8, 2)),
        (block(4, 32), (2, 5, 9, 64), (2, 5, 3, 2)),
        # an empty axis has no groups, but one whole axis
        (TENSOR, (0, 64), (1, 1)),
        (CHANNEL, (0, 64), (0, 1)),
        (CHANNEL, (8, 0), (8, 1)),
        (group(16), (8, 0), (8, 0)),
        (group(16), (0, 64), (0, 4)),
        (block(4, 32), (0, 0), (0, 0)),
    ],
)
def test_scale_shape(granularity: Granularity, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert granularity.scale_shape(shape) == expected


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [(TENSOR, (8, 24)), (CHANNEL, (1, 24)), (group(16), (1, 16)), (block(4, 32), (4, 32))],
    ids=str,
)
def test_extents(granularity: Granularity, expected: tuple[int, int]) -> None:
    assert granularity.extents((8, 24)) == expected


@pytest.mark.parametrize("granularity", ALL, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (8, 0)])
def test_extents_of_empty_tensors_can_divide(granularity: Granularity, shape: tuple[int, int]) -> None:
    assert min(granularity.extents(shape)) >= 1


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_text_form_parses_back(granularity: Granularity) -> None:
    assert Granularity.parse(str(granularity)) == granularity


@pytest.mark.parametrize(
    "text", ["", "row", "group", "group0", "group-1", "group016", "block128", "block0x4", "block4x"]
)
def test_what_is_no_granularity_is_refused(text: str) -> None:
    with pytest.raises(SchemeError, match="Unknown granularity"):
        Granularity.parse(text)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_positive(size: int) -> None:
    with pytest.raises(SchemeError, match="does not exist"):
        group(size)
    with pytest.raises(SchemeError, match="does not exist"):
        block(128, size)
    with pytest.raises(SchemeError, match="does not exist"):
        block(size, 128)
