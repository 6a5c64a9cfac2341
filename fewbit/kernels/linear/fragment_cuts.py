"""How a product over weight fragments is cut into blocks: from a table of measurements, or by rule without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fewbit.kernels.linear.fragment_layout import DEPTH, INTEGERS, FragmentLayout
from fewbit.kernels.linear.row_cuts import RowCut, row_cut_by_rule
from fewbit.kernels.tuned.choice import Chosen
from fewbit.kernels.tuned.table import Table, at_next_larger, first_measured

WARPGROUP = 128
SHARED_BYTES = 233472  # of a multiprocessor of compute capability 9.0, of which each block takes RESERVED_BYTES more
RESERVED_BYTES = 1024
SWIZZLED = 1024  # bytes that stages are whole multiples of


@dataclass(frozen=True)
class Cut:
    """One way to run a product.

    Attributes:
        tokens: of a block: 8, 16, 32, 64, 128 or 256; at most 192 where groups are summed.
        warpgroups: that multiply, each `tiles` times 64 output features.
        stages: in flight, of 128 input features each.
        step: times 16 input features, or 32 of `e4m3`, are decoded at once, where no groups are summed.
        cluster: blocks that share x.
        ahead: take a stage's codes into registers while the stage before is multiplied, where no groups are summed.
        residents: blocks that a multiprocessor has room for: with 2, those of the next kernel wait there with weights.
        blocks: of a launch for each multiprocessor.
        even: as few blocks as are no slower, with as much work each; else as many as there is room for.
        decodes_first: decode the whole weight, then let the vendor's library multiply.
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
    decodes_first: bool = False

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

    @property
    def shared_limit(self) -> int:
        """What a block may have of shared memory."""
        return SHARED_BYTES // self.residents - RESERVED_BYTES

    def shared_bytes(self, layout: FragmentLayout) -> int:
        """Shared memory of a block: stages, and two barriers for each."""
        stage = self.tokens * DEPTH * layout.operand_bytes + self.units * layout.unit_bytes
        return self.stages * (-(-stage // SWIZZLED) * SWIZZLED + 16)

    def fitted(self, layout: FragmentLayout) -> Cut:
        """The cut with as many of its stages as there is room for."""
        cut = self
        while cut.shared_bytes(layout) > cut.shared_limit:
            cut = replace(cut, stages=cut.stages - 1)
        return cut


DECODES_FIRST_FROM = 1025
"""Tokens from which weights are decoded once, into a matrix for the vendor's product."""
FEWEST_STAGES = 3
"""Of a cut that leaves the copy engine time; wide blocks of 8-bit weights have no room for them."""
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
_GROUPS_LOW = (Cut(16, stages=11), Cut(32, stages=10), Cut(64, stages=8), Cut(128, stages=8))
_GROUPS_HIGH = (
    Cut(16, tiles=2, stages=10),
    Cut(32, tiles=2, stages=9),
    Cut(64, tiles=2, stages=8),
    Cut(128, stages=8),
)
_FOLDED_LOW = (
    Cut(16, stages=12),
    Cut(32, stages=10),
    Cut(64, stages=8),
    Cut(128, stages=7),
    Cut(256, stages=5),
)
_FOLDED_HIGH = (
    Cut(16, tiles=2, stages=10),
    Cut(32, tiles=2, stages=9),
    Cut(64, tiles=2, stages=8),
    Cut(128, tiles=2, stages=6),
    _FOLDED_LOW[-1],
)
_BY_RULE = {False: (_LOW, _HIGH), True: (_FOLDED_LOW, _FOLDED_HIGH)}


AnyCut = Cut | RowCut


def cut_by_rule(layout: FragmentLayout, tokens: int) -> AnyCut:
    """A cut for shapes and devices that were not measured."""
    of_rows = row_cut_by_rule(layout, tokens)
    if of_rows is not None:
        return of_rows
    decoding = layout.decoding
    tables = (_GROUPS_LOW, _GROUPS_HIGH) if decoding.sums_groups else _BY_RULE[decoding.is_fp8]
    table = [cut for cut in tables[layout.rows >= TALL] if cut.fitted(layout).stages >= FEWEST_STAGES]
    cut = next((cut for cut in table if cut.tokens >= tokens), table[-1])
    return replace(cut, decodes_first=tokens >= DECODES_FIRST_FROM).fitted(layout)


def cut_of(fields: Mapping[str, Any]) -> AnyCut:
    """The cut of an entry of a table."""
    return RowCut(**fields) if "depth_warps" in fields else Cut(**fields)


def measured_cut(entries: Iterable[Mapping[str, Any]], layout: FragmentLayout, tokens: int) -> AnyCut | None:
    """The cut of the next larger M from the entries of one table, or None where no such shape was measured."""
    wanted = _measured_as(layout)
    measured = {
        entry["M"]: cut_of(entry["cut"])
        for entry in entries
        if _measured_as(FragmentLayout(**entry["layout"])) == wanted
    }
    cut = at_next_larger(measured, tokens)
    if isinstance(cut, RowCut) and cut.tokens < tokens:
        return None
    return None if cut is None else cut.fitted(layout)


def _measured_as(layout: FragmentLayout) -> FragmentLayout:
    """What measurements serve: integers whatever their groups, and both dtypes."""
    operand = layout.operand if layout.decoding.is_fp8 else ""
    group = 0 if layout.element == INTEGERS else layout.group
    return replace(layout, group=group, dtype="", offset=0, has_zero=False, operand=operand)


def cut_in(table: Table, layout: FragmentLayout, tokens: int) -> AnyCut:
    """The table's cut, or the one by rule."""
    return measured_cut(table.cuts, layout, tokens) or cut_by_rule(layout, tokens)


@cache
def cut_by_table(layout: FragmentLayout, tokens: int, device: str) -> AnyCut:
    """The cut that was fastest on the device at the next larger M, or the one by rule."""
    found = first_measured(device, lambda table: measured_cut(table.cuts, layout, tokens))
    return found or cut_by_rule(layout, tokens)


cut_for: Chosen[FragmentLayout, AnyCut] = Chosen(cut_by_table)
"""The cut for a product of so many tokens on a device of that name."""
