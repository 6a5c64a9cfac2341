"""What one prepared layout for every number of rows costs against a free choice at each, from a table's costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.registry import choose_kernel
from fewbit.kernels.select import DEFAULT_MIX, Preference
from fewbit.kernels.tuned.table import Table
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey


@dataclass(frozen=True)
class LayoutCost:
    """A layer's kernel, and the fastest one at every number of rows that was measured.

    Attributes:
        request: the layer.
        kernel: what is chosen for the mix, whose layout is prepared.
        at: rows of x -> microseconds of the kernel, the fastest kernel that keeps the same numerics, its microseconds.
    """

    request: LinearRequest
    kernel: str
    at: Mapping[int, tuple[float, str, float]]

    def __str__(self) -> str:
        slower = {rows: (own, best, us) for rows, (own, best, us) in self.at.items() if own > us}
        parts = [f"{own / us - 1:.0%} at {rows} rows ({best})" for rows, (own, best, us) in slower.items()]
        layer = f"{self.request.key} N={self.request.rows} K={self.request.columns}"
        return f"{layer}: {self.kernel}; " + (f"a free choice saves {', '.join(parts)}" if parts else "never slower")


def layout_costs(table: Table, hardware: Hardware, mix: Mapping[int, float] = DEFAULT_MIX) -> Iterator[LayoutCost]:
    """Of every layer of the table for which the chosen kernel was measured."""
    measured: dict[LinearRequest, dict[int, Mapping[str, float]]] = {}
    for entry in table.costs:
        request = LinearRequest(LinearKey.parse(entry["key"]), entry["N"], entry["K"], entry["dtype"])
        measured.setdefault(request, {})[entry["M"]] = entry["us"]
    for request, lines in measured.items():
        preference = Preference(mix=mix, costs=table.costs_of(request, mix))
        choice = choose_kernel(request, hardware, preference)
        same = {
            verdict.kernel.name
            for verdict in choice.verdicts
            if verdict.refusal is None and verdict.numerics is choice.numerics
        }
        at = {}
        for rows, us in sorted(lines.items()):
            if choice.kernel.name in us:
                best = min(same & us.keys(), key=us.__getitem__)
                at[rows] = us[choice.kernel.name], best, us[best]
        if at:
            yield LayoutCost(request, choice.kernel.name, at)
