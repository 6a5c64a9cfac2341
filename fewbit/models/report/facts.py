"""What a report's JSON says, read with suspicion: whoever hands on a checkpoint may have changed it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from fewbit.errors import CheckpointError

RECIPE_FILE = "fewbit_recipe.json"
REPORT_FILE = "quantization_report.json"
PAGE_FILE = "quantization_report.html"
_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.|$)")
_EXPERT = re.compile(r"\.experts\.(\d{1,9})\.")


@dataclass(frozen=True)
class LayerFacts:
    """One quantized layer as the report tells of it; None where it says nothing, or nothing that can be read.

    Attributes:
        bits: stored bits per weight.
    """

    name: str
    key: str
    method: str
    remarks: tuple[str, ...]
    shape: tuple[int, ...]
    bits: float | None
    sqnr_db: float | None
    loss: float | None
    clipped: float | None
    tokens: int | None

    @property
    def block(self) -> int | None:
        """The first number in the name: which decoder block it belongs to."""
        found = _NUMBER.search(self.name)
        return int(found[0]) if found else None

    @property
    def expert(self) -> int | None:
        """Which expert it belongs to."""
        found = _EXPERT.search(self.name)
        return int(found[1]) if found else None

    @property
    def place(self) -> str:
        """The name without its block and expert: layers of one place do the same in every block."""
        return _NUMBER.sub("*", self.name)


def read_report(folder: Path) -> dict[str, Any]:
    """The report of a quantized checkpoint.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    file = folder / REPORT_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no {REPORT_FILE}.", "Give a folder that fewbit quantized; `fewbit inspect` reads others."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}.", "Quantize again.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, needed an object.", "Quantize again.")
    return found


def layers_of(report: Mapping[str, Any]) -> Iterator[LayerFacts]:
    """The quantized layers that a report lists; entries that are none are passed over."""
    for entry in listed(report.get("layers")):
        if not isinstance(entry, Mapping):
            continue
        shape = tuple(extent for extent in listed(entry.get("shape")) if isinstance(extent, int))
        count, stored = prod(shape), number(entry.get("bytes"))
        yield LayerFacts(
            name=text(entry.get("name")),
            key=text(entry.get("key")),
            method=text(entry.get("method")),
            remarks=tuple(text(remark) for remark in listed(entry.get("remarks"))),
            shape=shape,
            bits=8 * stored / count if stored is not None and count > 0 else None,
            sqnr_db=number(entry.get("sqnr_db")),
            loss=number(entry.get("loss")),
            clipped=number(entry.get("clipped")),
            tokens=entry["tokens"] if type(entry.get("tokens")) is int else None,
        )


def listed(value: Any) -> list[Any]:
    """The value where it is a list, else nothing."""
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    """The value where it is an object, else nothing."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """Text of a name or a sentence; empty where there is none."""
    return "" if value is None else str(value)


def number(value: Any) -> float | None:
    """The value where it is a finite number."""
    try:
        return float(value) if type(value) in (int, float) and isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None
