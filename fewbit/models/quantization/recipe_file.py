"""The recipe that lies in a folder."""

from __future__ import annotations

from pathlib import Path

from fewbit.errors import SchemeError
from fewbit.models.report.facts import RECIPE_FILE
from fewbit.spec.recipe import Recipe


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe by which fewbit wrote the folder; None where there is none, or none of this version."""
    file = folder / RECIPE_FILE
    try:
        return Recipe.from_json(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (SchemeError, UnicodeDecodeError):
        return None
