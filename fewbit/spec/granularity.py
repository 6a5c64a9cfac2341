"""Granularity: how many numbers share one scale.

Every granularity is a rectangle over the last two axes of a tensor: rows of [N, K] weights are output features, rows
of [M, K] activations are tokens. A scale tensor therefore always has the two axes of its tensor, each divided by the
rectangle and rounded up, so that a short last group or an edge block is legal everywhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fewbit.errors import SchemeError

WHOLE = 0
"""An extent of 0 means the whole axis."""


@dataclass(frozen=True)
class Granularity:
    """A rectangle of `rows` x `columns` numbers under one scale; 0 stands for the whole axis.

    `kind` is one of tensor, channel, token, head, group, block. Channel and token are the same rectangle over different
    tensors (one scale per row of a weight, or per row of an activation) and stay apart because people ask for them by
    name. Head is the matrix [tokens, size] of each head of a cached key or value, where tensor has one scale for all.
    """

    kind: str
    rows: int
    columns: int

    def __str__(self) -> str:
        if self.kind == "group":
            return f"group{self.columns}"
        if self.kind == "block":
            return f"block{self.rows}x{self.columns}"
        return self.kind

    def extents(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns under one scale of a tensor of `shape` [..., R, C]; at least 1 each."""
        rows, columns = shape[-2:]
        return max(1, self.rows or rows), max(1, self.columns or columns)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of `shape` [..., R, C]: [..., ceil(R / rows), ceil(C / columns)].

        Whole axes give 1 even where the axis is empty.
        """
        rows, columns = self.extents(shape)
        return (
            *shape[:-2],
            -(-shape[-2] // rows) if self.rows else 1,
            -(-shape[-1] // columns) if self.columns else 1,
        )

    @classmethod
    def parse(cls, text: str) -> Granularity:
        """Reads the text form back: tensor, channel, token, head, group64, block128x128.

        Raises:
            SchemeError: the text is none of these, or an extent is 0.
        """
        if text in _FIXED:
            return _FIXED[text]
        if match := re.fullmatch(r"group([1-9]\d*)", text):
            return group(int(match[1]))
        if match := re.fullmatch(r"block([1-9]\d*)x([1-9]\d*)", text):
            return block(int(match[1]), int(match[2]))
        raise SchemeError(
            f"Unknown granularity {text!r}.", "Use tensor, channel, token, head, group<size> or block<rows>x<columns>."
        )


TENSOR = Granularity("tensor", WHOLE, WHOLE)
CHANNEL = Granularity("channel", 1, WHOLE)
TOKEN = Granularity("token", 1, WHOLE)
HEAD = Granularity("head", WHOLE, WHOLE)
_FIXED = {str(granularity): granularity for granularity in (TENSOR, CHANNEL, TOKEN, HEAD)}


def group(size: int) -> Granularity:
    """`size` consecutive numbers of a row share a scale; the last group of a row may be shorter."""
    if size < 1:
        raise SchemeError(f"A group of {size} numbers does not exist.", "Use a positive group size, or channel.")
    return Granularity("group", 1, size)


def block(rows: int, columns: int) -> Granularity:
    """A tile of `rows` x `columns` numbers shares a scale; tiles at the edges may be smaller."""
    if rows < 1 or columns < 1:
        raise SchemeError(f"A block of {rows}x{columns} numbers does not exist.", "Use positive block sizes.")
    return Granularity("block", rows, columns)
