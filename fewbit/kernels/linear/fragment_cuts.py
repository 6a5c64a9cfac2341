"""How a product over weight fragments is cut into blocks, by M."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fewbit.kernels.linear.fragment_layout import DEPTH, FragmentLayout

WARPGROUP = 128
SHARED_BYTES = 232448  # what a block may have on compute capability 9.0
RECEIVED_APART = 16384  # bytes of sums from other blocks up to which they have a place of their own
SWIZZLED = 1024  # bytes that stages are whole multiples of


@dataclass(frozen=True)
class Cut:
    """One way to run a product.

    Attributes:
        tokens: of a block: 8, 16, 32, 64, 128 or 256.
        warpgroups: that multiply, each `tiles` times 64 output features.
        stages: in flight, of 128 input features each.
        step: times 16 input features are decoded at once.
        cluster: blocks that share x.
        ahead: take a stage's codes into registers while the stage before is multiplied.
        residents: blocks that a multiprocessor has room for: with 2, those of the next kernel wait there with weights.
        blocks: of a launch for each multiprocessor.
        even: as few blocks as are no slower, with as much work each; else as many as there is room for.
        whole: no block gets part of a tile.
        parts: equal parts of K that blocks of a cluster take, and add up among themselves.
    """

    tokens: int
    warpgroups: int = 2
    tiles: int = 1
    stages: int = 4
    step: int = 2
    cluster: int = 1
    ahead: bool = False
    residents: int = 1
    blocks: int = 1
    even: bool = True
    whole: bool = False
    parts: int = 1

    @property
    def threads(self) -> int:
        """Of a block; one warpgroup feeds the others."""
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def units(self) -> int:
        """Units of output features of a block."""
        return self.warpgroups * self.tiles

    @property
    def sums(self) -> int:
        """float32 sums of a block."""
        return self.tiles * self.tokens // 2 * self.warpgroups * WARPGROUP

    def shared_bytes(self, layout: FragmentLayout) -> int:
        """Shared memory of a block: stages, and two barriers for each."""
        stage = self.tokens * DEPTH * layout.operand_bytes + self.units * layout.unit_bytes
        ring = self.stages * (-(-stage // SWIZZLED) * SWIZZLED + 16)
        received = 4 * max(self.sums, self.parts * 4 * self.warpgroups * WARPGROUP) if self.parts > 1 else 0
        return ring + (received if received <= RECEIVED_APART else 0)


DECODES_FIRST_FROM = 1025
"""Tokens from which weights are decoded once, into a matrix for the vendor's product."""
TALL = 16384
"""Output features from which blocks of twice the height leave no multiprocessor idle; they read x half as often."""
_LOW = (
    Cut(8, tiles=2, stages=10),
    Cut(16, tiles=2, stages=9),
    Cut(32, stages=8, step=4),
    Cut(64, stages=8, step=4),
    Cut(128, stages=5),
    Cut(256, stages=3),
)
_HIGH = (
    *_LOW[:2],
    Cut(32, tiles=2, stages=8, step=4),
    Cut(64, tiles=2, stages=6, step=4),
    Cut(128, tiles=2, stages=4, step=4),
    _LOW[-1],
)
_FP8_LOW = (Cut(16, stages=11), Cut(32, stages=10), Cut(64, stages=8), Cut(128, stages=8))
_FP8_HIGH = (
    Cut(16, tiles=2, stages=10),
    Cut(32, tiles=2, stages=9),
    Cut(64, tiles=2, stages=8),
    Cut(128, stages=8),
)


def cut_for(layout: FragmentLayout, tokens: int) -> Cut:
    """The cut for a number of tokens; scales of more groups leave room for fewer stages."""
    tables = (_FP8_LOW, _FP8_HIGH) if layout.operand == "e4m3" else (_LOW, _HIGH)
    table = tables[layout.rows >= TALL]
    cut = next((cut for cut in table if cut.tokens >= tokens), table[-1])
    while cut.shared_bytes(layout) > SHARED_BYTES // cut.residents:
        cut = replace(cut, stages=cut.stages - 1)
    return cut
