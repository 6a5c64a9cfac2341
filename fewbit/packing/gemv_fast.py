"""AutoAWQ's `gemv_fast` words (llm-awq's second layout): four 4-bit codes of a row in an int16 word, rows in fours.

Words lie [N/4, K]: a row of words holds four rows of codes, 64 input features at a time, one row's 16 words after the
other's. Of a row's 64 features, feature 32h + 8a + 2b + c is nibble a of word 8h + 2b + c.
Source: formats.md section 2, AutoAWQ 0.2.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.packing import fields
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 4, 64
"""Output and input features of the smallest piece that stands alone."""

# Axes of codes taken apart: row block, row, column block, half h of its 64 columns, then a, b, c of 8a + 2b + c.
_APART = (-7, -6, -5, -4, -3, -2, -1)
# As words hold them: row block, column block, row, h, b, c, and the nibble a.
_IN_WORDS = (-7, -5, -6, -4, -2, -1, -3)


class GemvFast(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "gemv_fast"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if (layout.bits, layout.word_bits, layout.axis, layout.transposed) != (4, 16, "K", False):
            raise ShapeError(
                f"gemv_fast words hold 4-bit codes along K in 16 bits, found {layout}.", "Use dense words."
            )
        if shape[-2] % ROWS or shape[-1] % COLUMNS:
            raise ShapeError(
                f"gemv_fast words need N and K that are multiples of {ROWS} and {COLUMNS}, found {list(shape[-2:])}.",
                "Use interleaved words.",
            )
        return (*shape[:-2], shape[-2] // ROWS, shape[-1])

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        apart = fields.fields_of(codes, layout).unflatten(-1, (-1, 2, 4, 4, 2)).unflatten(-6, (-1, ROWS))
        lead = tuple(range(apart.dim() - len(_APART)))
        nibbles = apart.permute(*lead, *_IN_WORDS).flatten(-6)
        return fields.stored(fields.words_of(nibbles, 4, 16), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        nibbles = fields.fields_in(fields.raw(words, layout), 4, 16, shape[-1] * ROWS)
        in_words = nibbles.unflatten(-1, (-1, ROWS, 2, 4, 2, 4))
        lead = tuple(range(in_words.dim() - len(_IN_WORDS)))
        back = [_APART[_IN_WORDS.index(axis)] for axis in _APART]
        return fields.codes_of(in_words.permute(*lead, *back).reshape(shape), layout, element)
