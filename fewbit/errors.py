"""What can go wrong for a user, as one tree of exceptions.

    FewbitError
    ├── SchemeError       a scheme, key, preset or pattern that cannot be understood
    ├── ShapeError        a shape, group or block that does not fit a layer
    ├── CheckpointError   a file or folder that cannot be read as what it claims to be
    ├── OutputError       a place that cannot be written; nothing was changed there
    ├── KernelError       a kernel that was asked for by name and cannot run
    └── ModelError        a model whose architecture or configuration is not supported

Each carries `message` (what was found and what is needed) and `hint` (the one thing to do next). The command line
prints both and exits with 2; anything outside this tree is a defect of fewbit and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FewbitError(Exception):
    """Base of every error that a user can cause and mend.

    Args:
        message: one sentence with the name, the value found and the value needed.
        hint: one sentence that says what to do, or an empty string.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} {hint}".strip())
        self.message = message
        self.hint = hint

    def add_hint(self, hint: str) -> None:
        """Adds a sentence to the hint."""
        self.hint = f"{self.hint} {hint}".strip()
        self.args = (f"{self.message} {self.hint}",)


class SchemeError(FewbitError):
    """A scheme, key, preset or pattern that cannot be understood."""


class ShapeError(FewbitError):
    """A shape, group or block that does not fit a layer."""


class CheckpointError(FewbitError):
    """A file or folder that cannot be read as what it claims to be."""


class OutputError(FewbitError):
    """A place that cannot be written; nothing that was there before has changed."""


class KernelError(FewbitError):
    """A kernel that was asked for by name and cannot run."""


class ModelError(FewbitError):
    """A model whose architecture or configuration is not supported."""


def closest(name: str, known: Iterable[str]) -> str:
    """A hint that names the known word closest to `name`, or lists them all when none is close."""
    words = sorted(known)
    folded = {word.casefold(): word for word in words}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return f"Did you mean {folded[near[0]]!r}?" if near else f"Known: {', '.join(words)}."
