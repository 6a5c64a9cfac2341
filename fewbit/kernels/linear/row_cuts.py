"""How a product of few rows of x over weight fragments is cut into blocks; see `few_rows.cuh`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fewbit.kernels.linear.fragment_layout import DEPTH, INTEGERS, ROWS, FragmentLayout

TILE = 16  # output features
WARP, MOST_WARPS = 32, 16
SHARED_LIMIT = 232448  # bytes of a block on a multiprocessor of compute capability 9.0
MOST_DIGIT_ROWS = 2
MOST_ROWS = 8
MOST_OFFSET = 1 << 32  # of bytes of a weight, which the kernel counts in 32 bits


@dataclass(frozen=True)
class RowCut:
    """One way to run a product of few rows of x.

    Attributes:
        digits: split x into digits and multiply codes as integers; rows of x up to `MOST_DIGIT_ROWS`.
        tokens: rows of x that a block has room for, up to `MOST_ROWS`.
        tiles: of 16 output features of a warp.
        row_warps: of a block, side by side over output features.
        depth_warps: of a block, taking turns at units of 128 input features.
        stages: units of input features in flight, for each warp.
        early: stages that are asked for before x is.
        cluster: blocks that the input features are cut over.
    """

    digits: bool
    tokens: int
    tiles: int
    row_warps: int
    depth_warps: int
    stages: int
    early: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.row_warps * self.depth_warps * WARP

    def launched(self, layout: FragmentLayout) -> int:
        """Blocks of a launch."""
        return -(-layout.units * (ROWS // TILE) // (self.tiles * self.row_warps)) * self.cluster

    def shared_bytes(self, layout: FragmentLayout) -> int:
        """Shared memory of a block: stages, then its features of x."""
        ring = self.row_warps * self.depth_warps * self.stages * self.tiles * layout.unit_bytes * TILE // ROWS
        depths = -(-layout.depths // self.cluster)
        if self.digits:
            factors = 4 * (1 + 2 * (DEPTH // layout.group))
            return ring + depths * self.tokens * (3 * DEPTH + -(-factors // 16) * 16)
        return ring + 16 + 2 * DEPTH + self.tokens * (2 * DEPTH * depths + 16)

    def fitted(self, layout: FragmentLayout) -> RowCut | None:
        """The cut with as many of its stages as there is room for, or None where there is none."""
        for stages in range(self.stages, 0, -1):
            cut = replace(self, stages=stages, early=min(self.early, stages))
            if cut.shared_bytes(layout) <= SHARED_LIMIT:
                return cut
        return None


MULTIPROCESSORS = 132
"""Of the devices with compute capability 9.0 that have most; a launch has no more blocks where that is possible."""
WIDTHS = (1, 2, 4, 8)
_TILES = (1, 2, 3, 4, 7)
_MOST_TILES = 8
_WASTE = 8  # a block has at most an eighth more tiles than each multiprocessor would have


def takes_row_cuts(layout: FragmentLayout, tokens: int) -> bool:
    """Whether a product of so many rows of x can be cut so."""
    fits = layout.element == INTEGERS and not layout.decoding.is_fp8 and layout.nbytes < MOST_OFFSET
    return fits and tokens <= MOST_ROWS


def row_cut_by_rule(layout: FragmentLayout, tokens: int) -> RowCut | None:
    """A cut for shapes and devices that were not measured, or None where x is too long or has too many rows."""
    if not takes_row_cuts(layout, tokens):
        return None
    for cluster in (1, 2, 4, 8):
        each = _tiles_of_block(layout, cluster)
        counts = (2, 3, 4, 1, 5, 6, 7, 8) if tokens <= MOST_DIGIT_ROWS else (7, 4, 3, 2, 1, 5, 6, 8)
        fine = [count for count in counts if count <= each <= count * MOST_WARPS]
        tiles = min(fine, key=lambda count: -each % count, default=_MOST_TILES)
        warps = MOST_WARPS if tiles <= 4 else MOST_WARPS // 2
        cut = _cut(layout, tokens, tiles, min(MOST_WARPS, -(-each // tiles)), warps, cluster)
        if cut is not None and cut.stages * cut.tiles >= min(2, cut.tiles * _turns(layout, cut)):
            return cut
    return None


def row_cut_candidates(layout: FragmentLayout, tokens: int) -> Iterator[RowCut]:
    """Cuts worth timing for a product of so many rows, each once."""
    if not takes_row_cuts(layout, tokens):
        return
    blocks = (
        (_cut(layout, tokens, tiles, -(-each // tiles), warps, cluster), each)
        for cluster in (1, 2)
        for each in (_tiles_of_block(layout, cluster),)
        for tiles in _TILES
        for warps in (MOST_WARPS, MOST_WARPS // 2)
        if tiles <= each <= tiles * MOST_WARPS
    )
    fine = (cut for cut, each in blocks if cut and (cut.tiles * cut.row_warps - each) * _WASTE <= each)
    yield from dict.fromkeys(replace(cut, early=early) for cut in fine for early in (1, min(2, cut.stages), cut.stages))


def _tiles_of_block(layout: FragmentLayout, cluster: int) -> int:
    return -(-layout.units * (ROWS // TILE) * cluster // MULTIPROCESSORS)


def _turns(layout: FragmentLayout, cut: RowCut) -> int:
    """Units of input features of a warp."""
    return -(-layout.depths // (cut.cluster * cut.depth_warps))


def _cut(layout: FragmentLayout, tokens: int, tiles: int, row_warps: int, warps: int, cluster: int) -> RowCut | None:
    """With stages for as many units as a warp has, or as there is room for, the first early."""
    if cluster > layout.depths:
        return None
    room = next(width for width in WIDTHS if width >= tokens)
    depth_warps = max(1, min(warps // row_warps, layout.depths // cluster))
    cut = RowCut(room <= MOST_DIGIT_ROWS, room, tiles, row_warps, depth_warps, 1, 1, cluster)
    return replace(cut, stages=_turns(layout, cut)).fitted(layout)
