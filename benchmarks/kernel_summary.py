"""What a run of `kernels.py` says as a whole: what its costs choose, and what that takes beside bf16 and each library.

Choices are made as `fewbit` makes them, by the oracle, from the costs of the run itself, for the default mix of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernel_columns import BF16, HUMMING, Layer

from fewbit.kernels.not_built import not_built
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.layouts import LayoutCost, layout_costs
from fewbit.kernels.tuned.table import Table
from fewbit.spec.hardware import DEVICES, Hardware

Results = dict[str, Any]
"""`machine`, `lines`, and what `failed` or was `not_run`, as `kernels.py` writes them."""
PACKAGE = "humming-kernels"
WITHIN = 1.05
CODE_LIBRARIES = ("torch", "cutlass")
"""Those that multiply codes which another kernel made."""
_NOT_CALLS = ("_product_us", "_other_ways_us")


@dataclass(frozen=True)
class Cell:
    """A layer at a number of rows.

    Attributes:
        line: its figures.
        own: microseconds of the kernel that is chosen for the layer.
        free: of the fastest kernel that keeps the same numerics.
        kernel: the chosen one.
    """

    line: dict[str, Any]
    own: float
    free: float
    kernel: str

    @property
    def scheme(self) -> str:
        return str(self.line["scheme"])

    @property
    def rows(self) -> int:
        return int(self.line["M"])

    def us(self, name: str) -> float | None:
        """Of a kernel, a rival or a product, or None where it was not timed."""
        return self.line.get(f"{name}_us")


def own_kernels() -> set[str]:
    """The kernels of fewbit that exist, Humming's among them."""
    return set(linear_kernels()) - set(not_built())


def costs_of(results: Results) -> list[dict[str, Any]]:
    """The run's costs as entries of a table: every kernel of fewbit, and no rival."""
    entries = []
    for line in results["lines"]:
        us = {name: line[f"{name}_us"] for name in sorted(own_kernels()) if f"{name}_us" in line}
        key = str(Layer(line["scheme"], line["N"], line["K"]).key)
        entries.append({"key": key, "dtype": BF16, "N": line["N"], "K": line["K"], "M": line["M"], "us": us})
    return entries


def cells_of(results: Results, with_humming: bool) -> list[Cell]:
    """Every layer and number of rows for which the chosen kernel was timed.

    Args:
        with_humming: whether the oracle may choose Humming where the run had it.
    """
    table, hardware = Table(results["machine"]["device"], "", {}, tuple(costs_of(results))), _hardware(results)
    if not with_humming:
        hardware = replace(hardware, software={k: v for k, v in hardware.software.items() if k != PACKAGE})
    chosen = {(str(c.request.key), c.request.rows, c.request.columns): c for c in layout_costs(table, hardware)}
    cells = []
    for line in results["lines"]:
        cost: LayoutCost | None = chosen.get((str(Layer(line["scheme"], 0, 0).key), line["N"], line["K"]))
        if cost is not None and line["M"] in cost.at:
            own, _, free = cost.at[line["M"]]
            cells.append(Cell(line, own, free, cost.kernel))
    return cells


def _hardware(results: Results) -> Hardware:
    machine = results["machine"]
    return replace(DEVICES[machine["hardware"]], model=machine["device"], software=machine["software"])


def rivals_of(cells: Iterable[Cell]) -> list[str]:
    """What a call was timed of beside fewbit's own kernels: bf16, and libraries."""
    figures = {figure for cell in cells for figure in cell.line if figure.endswith("_us")}
    names = {figure.removesuffix("_us") for figure in figures if not figure.endswith(_NOT_CALLS)}
    return sorted(names - (own_kernels() - {HUMMING}))


def summary(results: Results) -> Iterator[str]:
    """Lines for people."""
    alone, joint = cells_of(results, False), cells_of(results, True)
    for scheme in dict.fromkeys(cell.scheme for cell in alone):
        of = [cell for cell in alone if cell.scheme == scheme]
        kernels = {(cell.line["K"], cell.line["N"]): cell.kernel for cell in of}
        yield f"{scheme}: " + ", ".join(f"{k}x{n} {name}" for (k, n), name in kernels.items())
        yield "  bf16 over fewbit, sum of layers: " + _by_rows(of, lambda at: _total(at, BF16) / _own(at))
        yield "  one layout over a free choice: " + _by_rows(of, lambda at: _own(at) / sum(c.free for c in at))
    for scheme in dict.fromkeys(line["scheme"] for line in results["lines"]):
        if not any(cell.scheme == scheme for cell in alone):
            yield f"{scheme}: the kernel that is chosen was not timed"
    for name in rivals_of(alone):
        for called, cells in (("fewbit alone", alone), (f"fewbit with {HUMMING}", joint)):
            yield beside(name, called, cells)
    yield from choices(alone)
    yield from products(alone)
    for told in ("failed", "not_run"):
        yield f"{told.replace('_', ' ')}: " + ("; ".join(results[told]) or "nothing")


def _by_rows(cells: Sequence[Cell], figure: Any) -> str:
    """A figure for each number of rows at which every shape has it."""
    shapes = {(cell.line["K"], cell.line["N"]) for cell in cells}
    by_rows: dict[int, list[Cell]] = {}
    for cell in cells:
        by_rows.setdefault(cell.rows, []).append(cell)
    whole = {rows: at for rows, at in by_rows.items() if len(at) == len(shapes)}
    return ", ".join(f"{rows}: {figure(at):.2f}" for rows, at in sorted(whole.items()))


def _total(cells: Iterable[Cell], name: str) -> float:
    return sum(us if (us := cell.us(name)) is not None else math.nan for cell in cells)


def _own(cells: Iterable[Cell]) -> float:
    return sum(cell.own for cell in cells)


def beside(name: str, called: str, cells: Sequence[Cell]) -> str:
    """A library over fewbit: geometric mean and total of all that was timed of it."""
    timed = _timed(name, cells)
    figures = mean_and_total(name, cells)
    if figures is None:
        return f"{name}: nothing was timed of it"
    ahead = sum(own <= us for us, own in timed)
    return (
        f"{name} over {called}, {len(timed)} products: geometric mean {figures[0]:.2f}, total {figures[1]:.2f}, "
        f"fewbit no slower in {ahead}, at worst {min(us / own for us, own in timed):.2f}"
    )


def mean_and_total(name: str, cells: Sequence[Cell]) -> tuple[float, float] | None:
    """Geometric mean, and ratio of sums, of a library over fewbit; None where nothing was timed of it."""
    timed = _timed(name, cells)
    if not timed:
        return None
    mean = math.exp(sum(math.log(us / own) for us, own in timed) / len(timed))
    return mean, sum(us for us, _ in timed) / sum(own for _, own in timed)


def _timed(name: str, cells: Sequence[Cell]) -> list[tuple[float, float]]:
    return [(us, cell.own) for cell in cells if (us := cell.us(name)) is not None]


def choices(cells: Sequence[Cell]) -> Iterator[str]:
    """Whether what runs inside a layout is the fastest of the ways that read it."""
    others = [(cell, us) for cell in cells if (us := cell.us(f"{cell.kernel}_other_ways")) is not None]
    good = sum(cell.own <= WITHIN * us for cell, us in others)
    yield (
        f"within 5 % of the fastest way that reads the layout: {len(cells) - len(others) + good} of {len(cells)} "
        f"products, {good} of the {len(others)} that more rows have another way for"
    )
    for cell, us in others:
        if cell.own > WITHIN * us:
            yield f"  {_place(cell)}: {cell.kernel} {cell.own:.1f}, another way {us:.1f}"


def products(cells: Sequence[Cell]) -> Iterator[str]:
    """Products of codes alone beside the best of the libraries that multiply codes which another kernel made."""
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        of = [(cell, *pair) for cell in cells if cell.scheme == scheme and (pair := product_alone(cell)) is not None]
        if of:
            slower = [f"{_place(cell)} {own:.1f} for {best:.1f}" for cell, own, best in of if own > best]
            yield f"product alone, {scheme}: no slower than the best library in {len(of) - len(slower)} of {len(of)}"
            yield from (f"  slower: {text}" for text in slower)


def product_alone(cell: Cell) -> tuple[float, float] | None:
    """Microseconds of the chosen kernel's product of codes, and of the best library's, where both were timed."""
    own = cell.us(f"{cell.kernel}_product")
    others = [us for name in CODE_LIBRARIES if (us := cell.us(f"{name}_product")) is not None]
    return None if own is None or not others else (own, min(others))


def _place(cell: Cell) -> str:
    return f"{cell.scheme} K={cell.line['K']} N={cell.line['N']} M={cell.rows}"
