"""Views of a tensor by the rectangles that share a scale."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.numerics.blocks import block_extremes, from_blocks, over_blocks, to_blocks
from fewbit.spec import Granularity
from tests.spec.keys import GRANULARITIES

SHAPES = st.lists(st.integers(0, 3), max_size=2).flatmap(
    lambda lead: st.tuples(*map(st.just, lead), st.integers(0, 40), st.integers(0, 40))
)


@given(GRANULARITIES, SHAPES)
def test_from_blocks_undoes_to_blocks(granularity: Granularity, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    blocks = to_blocks(tensor, granularity)
    assert blocks.shape[:-4] == shape[:-2]
    assert (*shape[:-2], blocks.shape[-4], blocks.shape[-2]) == granularity.scale_shape(shape)
    assert torch.equal(from_blocks(blocks, shape), tensor)


@given(GRANULARITIES, SHAPES)
def test_extremes_are_those_of_each_rectangle_and_zero(granularity: Granularity, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape) + 1
    low, high = block_extremes(to_blocks(tensor, granularity))
    assert low.shape == high.shape == granularity.scale_shape(shape)
    rows, columns = granularity.extents(shape)
    for row in range(low.shape[-2]):
        for column in range(low.shape[-1]):
            piece = tensor[..., row * rows : (row + 1) * rows, column * columns : (column + 1) * columns].flatten(-2)
            piece = torch.cat([piece, torch.zeros(*piece.shape[:-1], 1)], -1)
            assert torch.equal(low[..., row, column], piece.amin(-1))
            assert torch.equal(high[..., row, column], piece.amax(-1))


@given(GRANULARITIES, SHAPES)
def test_a_scale_meets_the_numbers_it_covers(granularity: Granularity, shape: tuple[int, ...]) -> None:
    scale = torch.randn(granularity.scale_shape(shape))
    blocks = torch.zeros_like(to_blocks(torch.zeros(shape), granularity)) + over_blocks(scale)
    rows, columns = granularity.extents(shape)
    expected = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., : shape[-2], : shape[-1]]
    assert torch.equal(from_blocks(blocks, shape), expected)
