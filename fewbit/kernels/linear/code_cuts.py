"""How a product of 8-bit codes is cut into blocks by the CUDA kernel: from a table of measurements, or by rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fewbit.kernels.linear.product_layout import ProductLayout
from fewbit.kernels.linear.tile_plans import MULTIPROCESSORS
from fewbit.kernels.tuned.choice import Chosen
from fewbit.kernels.tuned.table import Table, at_next_larger, first_measured

WARPGROUP, WARP = 128, 32
SHARED_BYTES = 232448  # that a block may have on compute capability 9.0
LINE = 128  # bytes of a row of codes that the copy engine swizzles
WIDE = 320
MOST_STAGES = 16
INSTRUCTION = 64  # rows that the tensor cores read


@dataclass(frozen=True)
class CodeCut:
    """One way to run a product.

    Attributes:
        tokens: of a block: 8, 16 or 32, or 64 times warpgroups that divide them.
        rows: output features of a block: a multiple of 8 up to 32, of 16 up to 256.
        lines: of 128 input features in a stage.
        stages: in flight.
        warpgroups: that multiply; of up to 64 tokens each has its part of every stage.
        cluster: blocks that share what they read.
        shares_weight: blocks of a cluster share the weight and take other tokens, else the other way around.
        whole: blocks take whole tiles; else the work is cut into equal ranges, which tiles may be divided by.
        grouped: weights have scales of groups, and output features are what warpgroups divide, 64 each.
        elsewhere: the product by the plan of the Triton program, or the vendor's, instead.
    """

    tokens: int = INSTRUCTION
    rows: int = 64
    lines: int = 1
    stages: int = 4
    warpgroups: int = 1
    cluster: int = 1
    shares_weight: bool = False
    whole: bool = True
    grouped: bool = False
    elsewhere: bool = False

    @property
    def split(self) -> int:
        """Warpgroups that have parts of the same sums."""
        return self.warpgroups if self.tokens <= INSTRUCTION else 1

    @property
    def cluster_tokens(self) -> int:
        """Tokens of a cluster."""
        return self.tokens * (self.cluster if self.shares_weight else 1)

    def token_rows(self, tokens: int) -> int:
        """Rows of x that blocks read for so many tokens."""
        return -(-tokens // self.cluster_tokens) * self.cluster_tokens

    @property
    def threads(self) -> int:
        """Of a block; one warp feeds the others, a warpgroup where that gives its registers to them."""
        return self.warpgroups * WARPGROUP + (WARPGROUP if self.is_wide else WARP)

    @property
    def is_wide(self) -> bool:
        """Whether sums take so many registers that the threads that multiply need those of the others."""
        return self.grouped or self.rows * self.warpgroups >= WIDE

    @property
    def sums(self) -> int:
        """32-bit sums of a block."""
        return self.rows // 2 * self.warpgroups // self.split * WARPGROUP

    @property
    def grouped_width(self) -> int:
        """Tokens of an instruction whose left operand is the weight: half of 256, whose sums leave no registers."""
        return self.tokens if self.tokens <= 192 else 128

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages with two barriers each, sums that warpgroups leave, factors of rows."""
        stage = (self.tokens + self.rows) * self.lines * LINE
        busy = min(-(-self.tokens // 16) * WARP, WARPGROUP)
        left = (self.split - 1) * busy * self.rows // 2 * 4 // (1 + (self.tokens <= 8))
        # Instructions read 64 tokens whatever a block has: those of the last line may lie beyond all this.
        beyond = max(0, INSTRUCTION * LINE - (stage - (self.lines - 1) * self.tokens * LINE)) if self.tokens > 8 else 0
        scales = self.stages * 4 * self.rows if self.grouped else 3 * 4 * self.rows
        return self.stages * (stage + 16) + left + scales + beyond

    def fitted(self) -> CodeCut:
        """The cut with as many of its stages as there is room for, none where not even one has."""
        cut = self
        while cut.shared_bytes > SHARED_BYTES and cut.stages:
            cut = replace(cut, stages=cut.stages - 1)
        return cut


FEW = 64
"""Tokens up to which warpgroups divide the input features."""
TALLEST = 256
_WIDTHS = (8, 16, 32, INSTRUCTION)


def block_tokens(tokens: int) -> int:
    """Of a block that takes as many of the tokens as it can without reading others in vain."""
    return next((width for width in _WIDTHS if tokens <= width), 2 * INSTRUCTION)


def block_rows(rows: int, token_tiles: int) -> int:
    """Output features of a block so that blocks fill a device of `MULTIPROCESSORS`, in as few turns as there are."""
    turns = -(-rows * token_tiles // (MULTIPROCESSORS * TALLEST))
    height = -(-rows * token_tiles // (MULTIPROCESSORS * turns))
    return -(-height // 8) * 8 if height <= 32 else min(TALLEST, -(-height // 16) * 16)


VENDOR_FROM = 257
"""Tokens from which torch's product of E4M3 is as fast."""


def code_cut_by_rule(layout: ProductLayout, tokens: int) -> CodeCut:
    """A cut for shapes and devices that were not measured."""
    if tokens >= VENDOR_FROM and layout.operand == "e4m3":
        return CodeCut(elsewhere=True)
    width = block_tokens(tokens)
    rows = block_rows(layout.rows, -(-tokens // width))
    if tokens > FEW:
        return CodeCut(width, rows, 1, MOST_STAGES, 2, 2, rows % 16 == 0 and tokens > width).fitted()
    return CodeCut(width, rows, 2 if rows <= FEW else 1, MOST_STAGES, 2 if rows <= FEW else 1).fitted()


_GROUP_CUTS = (
    CodeCut(128, 192, 1, MOST_STAGES, 3, 2, shares_weight=True, grouped=True).fitted(),
    CodeCut(256, 128, 1, MOST_STAGES, 2, grouped=True).fitted(),
)


@cache
def group_cut(rows: int, tokens: int) -> CodeCut:
    """The cut for weights under scales of groups: the one whose last turn leaves less of the device idle."""

    def work(cut: CodeCut) -> int:
        tiles = -(-rows // cut.rows) * -(-tokens // cut.tokens)
        return -(-tiles // MULTIPROCESSORS) * cut.rows * cut.tokens

    return min(_GROUP_CUTS, key=work)


def measured_code_cut(entries: Iterable[Mapping[str, Any]], layout: ProductLayout, tokens: int) -> CodeCut | None:
    """The cut of the next larger M from the entries of one table, or None where no such shape was measured."""
    shape = {("rows", layout.rows), ("columns", layout.columns), ("operand", layout.operand)}
    measured = {entry["M"]: CodeCut(**entry["cut"]) for entry in entries if shape <= entry["layout"].items()}
    return at_next_larger(measured, tokens)


def code_cut_in(table: Table, layout: ProductLayout, tokens: int) -> CodeCut:
    """The table's cut, or the one by rule."""
    return measured_code_cut(table.code_cuts, layout, tokens) or code_cut_by_rule(layout, tokens)


@cache
def code_cut_by_table(layout: ProductLayout, tokens: int, device: str) -> CodeCut:
    """The cut that was fastest on the device at the next larger M, or the one by rule."""
    found = first_measured(device, lambda table: measured_code_cut(table.code_cuts, layout, tokens))
    return found or code_cut_by_rule(layout, tokens)


code_cut_for: Chosen[ProductLayout, CodeCut] = Chosen(code_cut_by_table)
"""The cut for a product of so many tokens on a device of that name."""
