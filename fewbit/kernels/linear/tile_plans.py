"""How a product over weight tiles is cut into programs: from a table of measurements, or by rule without one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from fewbit.kernels.linear.product_layout import ProductLayout
from fewbit.kernels.linear.weight_tiles import TILE_ROWS, TileLayout
from fewbit.kernels.tuned.choice import Chosen
from fewbit.kernels.tuned.table import at_next_larger, first_measured

MULTIPROCESSORS = 132  # where nothing was measured, products are cut for a device of this size
DECODES_FIRST_FROM = 257
FOLDED_UP_TO = 384


@dataclass(frozen=True)
class Plan:
    """One way to run a product.

    Attributes:
        block_n, block_m: outputs of a program; block_n divides or is a multiple of the tile's rows.
        warps, stages: of a program; stages of words in flight.
        programs: equal chunks that the work is cut into, 0 for one to a block of outputs.
        ahead: what is fetched of the weights while x is being made, a power of two or 0: lines of 128 bytes of each row
            of codes, units of tiles.
        folds: multiply decoded numbers by the scales of groups, rounded once more, where the layout allows it.
        described: read both sides through the tensor descriptors of compute capability 9.0, where the layout allows;
            `programs` then take whole blocks in turn.
        splits: where descriptors are used, `programs` are equal chunks all the same.
        depth: bytes of a row of codes that are read at a time where no scale of a group lies between; 0 for a line.
        registers: the most of a thread, so that more programs fit a multiprocessor; 0 for what the compiler takes.
        decodes_first: decode the whole weight, then let the vendor's library multiply where it has the product.
    """

    block_n: int = TILE_ROWS
    block_m: int = 16
    warps: int = 4
    stages: int = 4
    programs: int = 0
    decodes_first: bool = False
    ahead: int = 0
    folds: bool = False
    described: bool = False
    splits: bool = False
    depth: int = 0
    registers: int = 0


WeightLayout = TileLayout | ProductLayout


def is_possible(plan: Plan, layout: WeightLayout) -> bool:
    """Whether the layout can be cut so."""
    return plan.decodes_first or isinstance(layout, ProductLayout) or layout.padded_rows % plan.block_n == 0


def _alike(layout: WeightLayout) -> tuple[Set[tuple[str, Any]], ...]:
    """What entries of tables must hold to serve the layout, the best first."""
    shape = {("rows", layout.rows), ("columns", layout.columns), ("kind", layout.kind)}
    if isinstance(layout, ProductLayout):
        return asdict(layout).items(), shape | {("operand", layout.operand)}
    same_width = {("bits", layout.bits), ("rows", layout.rows), ("columns", layout.columns)}
    return asdict(layout).items(), shape | same_width, same_width


@cache
def plan_by_table(layout: WeightLayout, tokens: int, device: str) -> Plan:
    """The plan that was fastest on the device at the next larger M, or the one by rule.

    A layout that was not measured takes the plans of one of the same shape, width and, if possible, kind.
    """
    found = first_measured(device, lambda table: measured_plan(table.plans, layout, tokens))
    return found or plan_by_rule(layout, tokens)


def measured_plan(entries: Iterable[Mapping[str, Any]], layout: WeightLayout, tokens: int) -> Plan | None:
    """The same from the entries of one table, or None where nothing like the layout was measured."""
    entries = list(entries)
    for wanted in _alike(layout):
        measured = {entry["M"]: Plan(**entry["plan"]) for entry in entries if wanted <= entry["layout"].items()}
        if measured:
            return at_next_larger(measured, tokens)
    return None


def plan_by_rule(layout: WeightLayout, tokens: int) -> Plan:
    """A plan for shapes and devices that were not measured."""
    if isinstance(layout, ProductLayout):
        return _product_plan_by_rule(layout, tokens)
    if tokens >= DECODES_FIRST_FROM:
        return Plan(decodes_first=True)
    block_m = next(size for size in (16, 32, 64) if tokens <= size or size == 64)
    block_n = 128 if layout.padded_rows % 128 == 0 and layout.padded_rows >= 16384 else TILE_ROWS
    blocks = layout.padded_rows // block_n * -(-tokens // block_m)
    programs = min(4 * MULTIPROCESSORS, blocks * layout.units) if blocks < 2 * MULTIPROCESSORS else 0
    return Plan(block_n, block_m, 4, 4, programs)


def _product_plan_by_rule(layout: ProductLayout, tokens: int) -> Plan:
    by_rows = not (layout.group or layout.x_group) or layout.folds
    if tokens > 64:  # sums of groups leave the tensor cores after each, which small blocks hide better
        blocks = (128, 128) if by_rows and layout.operand == "int8" else (64, 128)
        first = layout.operand == "e4m3" and by_rows and (tokens > FOLDED_UP_TO or not layout.folds)
        return Plan(*blocks, 4, 3, decodes_first=first)
    block_m = next(size for size in (16, 32, 64, 128) if tokens <= size or size == 128)
    blocks = -(-layout.rows // 64)
    programs = min(3 * MULTIPROCESSORS, blocks * layout.units) if blocks < 2 * MULTIPROCESSORS else 0
    return Plan(64, block_m, 4, 4, programs)


FIXED_PARTS = 4
FIXED_BLOCK_M = 64


def fixed_plan(layout: WeightLayout, tokens: int) -> Plan:
    """The plan under which a row gets the same bits whatever M is: equal tiles, equal parts of K for every block."""
    parts = next(parts for parts in range(FIXED_PARTS, 0, -1) if layout.units % parts == 0)
    blocks = -(-layout.rows // TILE_ROWS) * -(-tokens // FIXED_BLOCK_M)
    return Plan(TILE_ROWS, FIXED_BLOCK_M, 4, 3, blocks * parts)


def rows_at_once(layout: WeightLayout, counters: int) -> int:
    """Rows of x whose blocks so many counters suffice for under the fixed plan."""
    return max(1, counters // -(-layout.rows // TILE_ROWS)) * FIXED_BLOCK_M


plan_for: Chosen[WeightLayout, Plan] = Chosen(plan_by_table)
"""The plan for a product of so many tokens on a device of that name."""
