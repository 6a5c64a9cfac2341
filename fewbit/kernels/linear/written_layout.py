"""Layouts of prepared weights as text, which is all that the schema of an operation can hold of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Self


@dataclass(frozen=True)
class WrittenLayout:
    """A layout whose text has every field by name."""

    @classmethod
    @cache
    def parse(cls, text: str) -> Self:
        """Reads `str(layout)` back."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return json.dumps(asdict(self))
