"""What commands print: tables and progress for people, one JSON value for programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH = 120
"""Columns where the output is no terminal; rich would take 80 and break names."""

console = Console()
errors = Console(stderr=True)
for _output in (console, errors):
    if not _output.is_terminal:
        _output.width = PIPE_WIDTH


def print_json(value: Any) -> None:
    """Prints one JSON value on standard output."""
    print(json.dumps(value, indent=2, default=str))


def table(title: str, columns: dict[str, str], rows: list[list[str]]) -> Table:
    """A table.

    Args:
        title: above it.
        columns: heading -> `left` or `right`.
        rows: cells as text.
    """
    made = Table(title=title, title_justify="left", header_style="bold")
    for heading, side in columns.items():
        made.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell.replace("[", r"\[") for cell in row))
    return made


def size(nbytes: float) -> str:
    """Bytes for people: 1.23 GB, decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


@contextmanager
def progress(label: str, total: float, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A progress bar on standard error; yields what advances it by an amount.

    Args:
        label: what is going on.
        total: the amount at the end.
        quiet: show nothing (JSON output, or no terminal worth drawing on).
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=errors, disable=quiet, transient=not errors.is_terminal) as bar:
        task = bar.add_task(label, total=max(total, 1))
        yield lambda amount: bar.update(task, advance=amount)


def quiet_libraries() -> None:
    """Keeps transformers' notices out of what a person reads; its errors still show."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
