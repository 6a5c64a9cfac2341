"""How a product over weight tiles is cut into programs: from a table of measurements, or by rule without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache

from fewbit.kernels.linear.weight_tiles import TILE_ROWS, TileLayout
from fewbit.kernels.tuned.table import tables_of

MULTIPROCESSORS = 132  # where nothing was measured, products are cut for a device of this size
DECODES_FIRST_FROM = 257


@dataclass(frozen=True)
class Plan:
    """One way to run a product.

    Attributes:
        block_n, block_m: outputs of a program; block_n divides or is a multiple of the tile's rows.
        warps, stages: of a program; stages of words in flight.
        programs: equal chunks that the work is cut into, 0 for one to a block of outputs.
        decodes_first: decode the whole weight, then let the vendor's library multiply.
    """

    block_n: int = TILE_ROWS
    block_m: int = 16
    warps: int = 4
    stages: int = 4
    programs: int = 0
    decodes_first: bool = False


Planner = Callable[[TileLayout, int, str], Plan]


def is_possible(plan: Plan, layout: TileLayout) -> bool:
    """Whether the layout can be cut so."""
    return plan.decodes_first or layout.padded_rows % plan.block_n == 0


@cache
def plan_by_table(layout: TileLayout, tokens: int, device: str) -> Plan:
    """The plan that was fastest on the device at the next larger M, or the one by rule.

    A layout that was not measured takes the plans of one of the same shape, width and, if possible, kind.
    """
    same_width = {"bits": layout.bits, "rows": layout.rows, "columns": layout.columns}.items()
    same_kind = same_width | {("kind", layout.kind)}
    for table in tables_of(device):
        for wanted in (asdict(layout).items(), same_kind, same_width):
            measured = {entry["M"]: Plan(**entry["plan"]) for entry in table.plans if wanted <= entry["layout"].items()}
            larger = [rows for rows in measured if rows >= tokens]
            if measured:
                return measured[min(larger) if larger else max(measured)]
    return plan_by_rule(layout, tokens)


def plan_by_rule(layout: TileLayout, tokens: int) -> Plan:
    """A plan for shapes and devices that were not measured."""
    if tokens >= DECODES_FIRST_FROM:
        return Plan(decodes_first=True)
    block_m = next(size for size in (16, 32, 64) if tokens <= size or size == 64)
    block_n = 128 if layout.padded_rows % 128 == 0 and layout.padded_rows >= 16384 else TILE_ROWS
    blocks = layout.padded_rows // block_n * -(-tokens // block_m)
    programs = min(4 * MULTIPROCESSORS, blocks * layout.units) if blocks < 2 * MULTIPROCESSORS else 0
    return Plan(block_n, block_m, 4, 4, programs)


_planner: Planner = plan_by_table


def plan_for(layout: TileLayout, tokens: int, device: str) -> Plan:
    """The plan for a product of `tokens` rows on a device of that name."""
    return _planner(layout, tokens, device)


@contextmanager
def using_plans(planner: Planner) -> Iterator[None]:
    """Uses another planner meanwhile: how plans are measured and tested."""
    global _planner  # noqa: PLW0603 - the operation's schema holds tensors and a layout, nothing else
    before, _planner = _planner, planner
    try:
        yield
    finally:
        _planner = before
