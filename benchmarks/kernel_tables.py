"""The tables of docs/performance.md from a run of `kernels.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kernel_aims import aims
from kernel_columns import BF16, HUMMING
from kernel_summary import Cell, Results, cells_of, rivals_of

PLAIN = "fewbit"
Figure = Callable[[Cell], float | None]


def tables(results: Results) -> Iterator[str]:
    """Markdown: each scheme beside its rivals, sums over the layer, aims."""
    alone = cells_of(results, False)
    with_humming = {id(cell.line): cell for cell in cells_of(results, True)}
    for scheme in dict.fromkeys(cell.scheme for cell in alone):
        yield f"### {scheme}"
        yield ""
        yield from beside_rivals([cell for cell in alone if cell.scheme == scheme], with_humming)
        yield ""
    yield "### Over the layer"
    yield ""
    yield from sums(alone)
    yield ""
    yield "### Aims"
    yield ""
    yield "| Aim | Found | |"
    yield "|---|---|---|"
    yield from map(str, aims(alone, list(with_humming.values())))


def beside_rivals(cells: Sequence[Cell], with_humming: dict[int, Cell]) -> Iterator[str]:
    """Microseconds of a scheme: a row for each shape and library, a column for each number of rows."""
    ladder = sorted({cell.rows for cell in cells})
    rivals = [name for name in rivals_of(cells) if name != BF16]
    yield from _head(["K x N", "", *map(str, ladder)])
    for shape in dict.fromkeys((cell.line["K"], cell.line["N"]) for cell in cells):
        at = {cell.rows: cell for cell in cells if (cell.line["K"], cell.line["N"]) == shape}
        several: dict[str, Figure] = {BF16: lambda cell: cell.us(BF16), f"{PLAIN}: {at[ladder[0]].kernel}": _own}
        joined = with_humming[id(at[ladder[0]].line)]
        if joined.kernel == HUMMING:
            several[f"{PLAIN} with Humming"] = lambda cell: with_humming[id(cell.line)].own
        several |= {name: lambda cell, name=name: cell.us(name) for name in rivals}
        if rivals:
            several["best rival / fewbit"] = lambda cell: _ratio(_best(cell, rivals), cell.own)
        several["bf16 / fewbit"] = lambda cell: _ratio(cell.us(BF16), cell.own)
        for turn, (name, figure) in enumerate(several.items()):
            digits = 2 if "/" in name else 1
            numbers = [_text(figure(at[rows]) if rows in at else None, digits) for rows in ladder]
            yield _row([f"{shape[0]}x{shape[1]}" if not turn else "", name, *numbers])


def sums(cells: Sequence[Cell]) -> Iterator[str]:
    """bf16 over fewbit, sums over all shapes of a scheme, and what the one layout costs there."""
    ladder = sorted({cell.rows for cell in cells})
    yield from _head(["", "", *map(str, ladder)])
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        by_rows = {rows: [one for one in cells if one.scheme == scheme and one.rows == rows] for rows in ladder}
        shapes = max(len(at) for at in by_rows.values())
        faster, slower = [], []
        for at in by_rows.values():
            bf16 = [us for cell in at if (us := cell.us(BF16)) is not None]
            own, free = sum(cell.own for cell in at), sum(cell.free for cell in at)
            faster.append(_text(sum(bf16) / own if len(bf16) == shapes else None, 2))
            slower.append(_text(own / free if len(at) == shapes else None, 2))
        yield _row([scheme, "bf16 / fewbit", *faster])
        yield _row(["", "one layout / free choice", *slower])


def _own(cell: Cell) -> float:
    return cell.own


def _best(cell: Cell, names: Sequence[str]) -> float | None:
    return min((us for name in names if (us := cell.us(name)) is not None), default=None)


def _ratio(above: float | None, below: float) -> float | None:
    return None if above is None else above / below


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if value < 1000 else f"{value:.0f}"


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _row(columns)
    yield "|---|---|" + "--:|" * (len(columns) - 2)


def _row(columns: Sequence[str]) -> str:
    return "| " + " | ".join(columns) + " |"
