"""The golden vectors: what the original projects' own code wrote, as tensors.

The file's conventions: 32-bit words are unsigned hexadecimal strings, row-major as stored; `out_in` means that rows are
output features; numbers that are not finite are strings.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN_FILE = Path(__file__).parent / "data" / "golden" / "formats.json"


@cache
def golden_vectors() -> dict[str, dict[str, Any]]:
    """Every vector by its id."""
    return {vector["id"]: vector for vector in json.loads(GOLDEN_FILE.read_text())["vectors"]}


def ids(prefix: str) -> list[str]:
    """The ids that start with `prefix`; at least one, so that a test over them never runs over nothing."""
    found = [name for name in golden_vectors() if name.startswith(prefix)]
    assert found, f"no golden vector starts with {prefix!r}"
    return found


def floats(values: Any) -> Tensor:
    """Nested lists of numbers, or of the strings nan, inf and -inf, as float32."""
    return torch.tensor(_numbers(values), dtype=torch.float32)


def words(values: Any) -> Tensor:
    """Nested lists of 32-bit words in unsigned hexadecimal as int32, bit for bit."""
    return torch.tensor(_words(values), dtype=torch.int32)


def stored(entry: dict[str, Any]) -> Tensor:
    """A tensor of a vector's `tensors`: dtype, shape and one of values, hex, bytes."""
    if "hex" in entry:
        return words(entry["hex"])
    dtype = getattr(torch, entry["dtype"])
    if "bytes" in entry:
        return torch.tensor(entry["bytes"], dtype=torch.uint8).view(dtype)
    return torch.tensor(_numbers(entry["values"])).to(dtype)


def _numbers(values: Any) -> Any:
    return [_numbers(value) for value in values] if isinstance(values, list) else float(values)


def _words(values: Any) -> Any:
    if isinstance(values, list):
        return [_words(value) for value in values]
    word = int(values, 16)
    return word - (1 << 32) if word >> 31 else word
