"""A tuning session: every layer in turn, the table written after each, so that stopping keeps what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.tile_plans import Plan, plan_by_rule, using_plans
from fewbit.kernels.linear.weight_tiles import TileLayout
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.table import COMPARED, Table, name_of, tables_of
from fewbit.kernels.tuned.tune import LADDER, Progress, compile_candidates, tune_costs, tune_plans
from fewbit.spec.hardware import Hardware


def tune_layers(
    requests: Sequence[LinearRequest], hardware: Hardware, ladder: Sequence[int] | None, path: Path, say: Progress
) -> Table:
    """Measures every request and writes the table; measurements of other layers that the file holds are kept.

    Raises:
        CheckpointError: the file is there and is no table.
    """
    table = Table.read(path) if path.is_file() else Table(name_of(hardware), hardware.driver, {})
    software = {package: hardware.software[package] for package in COMPARED if package in hardware.software}
    table = replace(table, driver=hardware.driver, software=software)
    tiles = linear_kernels()["triton_tiles"]
    distinct = list(dict.fromkeys(requests))
    tiled = [request for request in distinct if tiles.refuse(request, hardware) is None]
    compile_candidates(tiled, ladder or LADDER)
    for request in distinct:
        if request in tiled:
            plans = tune_plans(request, ladder or LADDER, say)
            table = replace(table, plans=_merged(table.plans, plans, ("layout", "M")))
        with using_plans(lambda layout, tokens, _, table=table: plan_in(table, layout, tokens)):
            costs = tune_costs(request, hardware, ladder or LADDER, say)
        table = replace(table, costs=_merged(table.costs, costs, ("key", "dtype", "N", "K", "M")))
        table.write(path)
    tables_of.cache_clear()
    return table


def plan_in(table: Table, layout: TileLayout, tokens: int) -> Plan:
    """The table's plan for exactly that many rows, or the one by rule."""
    for entry in table.plans:
        if entry["layout"] == asdict(layout) and entry["M"] == tokens:
            return Plan(**entry["plan"])
    return plan_by_rule(layout, tokens)


def _merged(old: Sequence[Any], new: Sequence[Any], identity: tuple[str, ...]) -> tuple[Any, ...]:
    """Old and new entries; where two are of the same layer and M, the new one."""
    entries = {str([entry[name] for name in identity]): entry for entry in (*old, *new)}
    return tuple(entries.values())
