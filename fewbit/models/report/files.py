"""The report's page and the model card, written beside a quantized checkpoint from what lies there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import OutputError
from fewbit.models.report.facts import PAGE_FILE, RECIPE_FILE, REPORT_FILE, mapped, read_report
from fewbit.models.report.model_card import CARD_FILE, SOURCE_CARD_FILES, card_of, is_ours
from fewbit.models.report.page import page_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes the report as JSON and as a page, and the model card.

    A card that fewbit did not write is the source model's; it is kept beside the new one.

    Args:
        folder: holds the checkpoint, its recipe, and possibly a card.
        report: what was done.

    Raises:
        OutputError: a file cannot be written.
    """
    recipe = _recipe(folder)
    pages = {
        REPORT_FILE: json.dumps(report, indent=2),
        PAGE_FILE: page_of(report, recipe, bytes_by_group(folder)),
        CARD_FILE: card_of(report, recipe, _source_card(folder)),
    }
    for name, content in pages.items():
        _replace(folder / name, content)


def render_again(folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes page and card anew from the report that lies in `folder`, with changes to its fields.

    Returns:
        The report.

    Raises:
        CheckpointError: there is no report, or it is no JSON object.
        OutputError: a file cannot be written.
    """
    report = {**read_report(folder), **changes}
    write_report(folder, report)
    return report


def bytes_by_group(folder: Path) -> dict[str, int]:
    """Bytes of tensors by the module that holds them, blocks and experts taken together, a block's projections too."""
    groups: dict[str, int] = {}
    for name, header in TensorFolder(folder).headers.items():
        module = _NUMBER.sub("*", name).rpartition(".")[0]
        parent = module.rpartition(".")[0]
        group = parent if "*" in parent else module
        groups[group] = groups.get(group, 0) + nbytes(header)
    return groups


def _recipe(folder: Path) -> dict[str, Any]:
    try:
        return mapped(json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):  # the report tells what it can without
        return {}


def _source_card(folder: Path) -> tuple[str, str] | None:
    """Name and text of the source model's card, which makes room for the one to be written; None where it has none."""
    kept = [name for name in SOURCE_CARD_FILES if (folder / name).exists()]
    card = folder / CARD_FILE
    if card.is_file() and not is_ours(_content(card)):
        free = next((name for name in SOURCE_CARD_FILES if name not in kept), None)
        if free is None:
            raise OutputError(f"{card} is not fewbit's, and there are {len(kept)} cards beside it.", "Remove some.")
        card.rename(folder / free)
        return free, _content(folder / free)
    return (kept[-1], _content(folder / kept[-1])) if kept else None


def _content(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _replace(file: Path, content: str) -> None:
    """Writes a file so that it is there as a whole or as it was before."""
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8", errors="backslashreplace")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"{file} cannot be written: {error.strerror}.", "Make room, or copy the folder.") from error
