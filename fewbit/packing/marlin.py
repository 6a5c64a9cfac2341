"""Marlin words: 4-bit codes in the order in which a warp's tensor-core fragments want them.

A tile is 16 input features by 64 output features, 1024 codes in 128 int32 words; tiles lie row by row, so that words
are [K/16, 2N]. Within a tile, 32 lanes hold 32 codes each, and the eight codes of a word are interleaved as in
`interleaved`. Scales are permuted too (`scale_order`), so that a lane finds those of its own columns side by side.

Sources: formats.md section 2; AutoAWQ 0.2.9; Frantar et al., "MARLIN", 2024.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.lazy import torch
from fewbit.packing import fields
from fewbit.packing.interface import Packing
from fewbit.packing.interleaved import ORDER
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 64, 16
"""Output and input features of a tile."""

_SIDE = 16  # a tile is four squares of this side, next to each other along N


class Marlin(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "marlin"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if (layout.bits, layout.word_bits, layout.axis, layout.transposed) != (4, 32, "K", True):
            raise ShapeError(
                f"Marlin words hold 4-bit codes along K in 32 bits, transposed, found {layout}.", "Use dense words."
            )
        if shape[-2] % ROWS or shape[-1] % COLUMNS:
            raise ShapeError(
                f"Marlin tiles need N and K that are multiples of {ROWS} and {COLUMNS}, found {list(shape[-2:])}.",
                "Use interleaved words.",
            )
        return (*shape[:-2], shape[-1] // COLUMNS, 2 * shape[-2])

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        # [..., N, K] -> [..., K/16, N/16, 16 of K, 16 of N]: squares, each row-major in K.
        squares = fields.fields_of(codes, layout).unflatten(-1, (-1, _SIDE)).unflatten(-3, (-1, _SIDE))
        lead = tuple(range(squares.dim() - 4))
        tiles = squares.permute(*lead, -2, -4, -1, -3).flatten(-3).unflatten(-1, (-1, ROWS * COLUMNS))
        ordered = tiles[..., _tile_order().to(codes.device)].flatten(-2)
        return fields.narrowed(fields.words_of(ordered, 4, 32), 32)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        ordered = fields.fields_in(words.to(torch.int64) & 0xFFFFFFFF, 4, 32, words.shape[-1] * 8)
        tiles = ordered.unflatten(-1, (-1, ROWS * COLUMNS))[..., _tile_order().argsort().to(words.device)]
        squares = tiles.flatten(-2).unflatten(-1, (-1, _SIDE, _SIDE))
        lead = tuple(range(squares.dim() - 4))
        return fields.codes_of(squares.permute(*lead, -3, -1, -4, -2).reshape(shape), layout, element)


def scale_order(grouped: bool) -> Tensor:
    """Which output feature of a run each stored scale belongs to; runs of 64 with scales in groups, of 32 without."""
    if grouped:
        return torch.arange(64).reshape(8, 8).T.flatten()
    pairs = torch.arange(32).reshape(4, 4, 2)  # [half word, lane, number]
    return pairs.transpose(0, 1).flatten()


@cache
def _tile_order() -> Tensor:
    """Which code of a tile (four squares, each row-major in K) lies at each place of its words."""
    lane, square = torch.arange(32), torch.arange(4)
    # A lane holds two columns, 8 apart, and four rows: two neighbours and the two that lie 8 below them.
    rows = 2 * (lane % 4)[:, None] + torch.tensor([0, 1, 8, 9])
    columns = (lane // 4)[:, None] + torch.tensor([0, 8])
    in_square = _SIDE * rows[:, None, :] + columns[:, :, None]  # [lane, column, row]
    places = in_square.flatten(1)[:, None, :] + (_SIDE * _SIDE * square)[None, :, None]
    return places[..., list(ORDER)].flatten()
