"""A tuning session: every layer in turn, the table written after each, so that stopping keeps what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.code_cuts import code_cut_for
from fewbit.kernels.linear.fragment_cuts import cut_for
from fewbit.kernels.linear.tile_plans import Plan, WeightLayout, measured_plan, plan_by_rule, plan_for
from fewbit.kernels.tuned.code_cuts import code_cutter_of, tune_code_cuts
from fewbit.kernels.tuned.cuts import cutter_of, tune_cuts
from fewbit.kernels.tuned.table import COMPARED, Table, merged, name_of, tables_of, with_costs
from fewbit.kernels.tuned.tune import (
    LADDER,
    Progress,
    compile_candidates,
    planned,
    tune_costs,
    tune_plans,
)
from fewbit.spec.hardware import Hardware

WAYS_ARE_OF = ("layout", "M")
"""What tells entries of plans, and of cuts, from each other."""


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
    distinct = list(dict.fromkeys(requests))
    found = {request: planned(request, hardware) for request in distinct}
    layouts = [(layout, request.dtype) for request, pairs in found.items() for _, layout in pairs]
    compile_candidates(layouts, ladder or LADDER)
    for request, pairs in found.items():
        for kernel, layout in pairs:
            plans = tune_plans(request, kernel, layout, ladder or LADDER, say)
            table = replace(table, plans=merged(table.plans, plans, WAYS_ARE_OF))
        cuts = tune_cuts(request, hardware, ladder or LADDER, say)
        table = replace(table, cuts=merged(table.cuts, cuts, WAYS_ARE_OF))
        code_cuts = tune_code_cuts(request, hardware, ladder or LADDER, say)
        table = replace(table, code_cuts=merged(table.code_cuts, code_cuts, WAYS_ARE_OF))
        plans_in_table = plan_for.by(lambda layout, tokens, _, table=table: plan_in(table, layout, tokens))
        with plans_in_table, cut_for.by(cutter_of(table)), code_cut_for.by(code_cutter_of(table)):
            costs = tune_costs(request, hardware, ladder or LADDER, say)
        table = with_costs(table, costs)
        table.write(path)
    tables_of.cache_clear()
    return table


def plan_in(table: Table, layout: WeightLayout, tokens: int) -> Plan:
    """The table's plan, or the one by rule."""
    return measured_plan(table.plans, layout, tokens) or plan_by_rule(layout, tokens)
