"""Reversed words: the dense words of `dense` with the first code of each word in its highest bits.

For widths that divide the word. Quark's 2-bit codes are such bytes along N, transposed. Source: formats.md section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.lazy import torch
from fewbit.packing import fields
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class Reversed(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "reversed"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout.word_bits not in fields.WORD_BITS or not 1 <= layout.bits <= 8 or layout.word_bits % layout.bits:
            raise ShapeError(
                f"There are no reversed words of {layout.word_bits} bits that hold codes of {layout.bits} bits.",
                "Use a width that divides the word.",
            )
        per_word = layout.word_bits // layout.bits
        return fields.shape_with(-(-fields.extent_along(shape, layout) // per_word), shape, layout)

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        found, per_word = fields.fields_of(codes, layout), layout.word_bits // layout.bits
        runs = torch.nn.functional.pad(found, (0, -found.shape[-1] % per_word)).unflatten(-1, (-1, per_word))
        return fields.stored(fields.words_of(runs.flip(-1).flatten(-2), layout.bits, layout.word_bits), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        raw, per_word = fields.raw(words, layout), layout.word_bits // layout.bits
        runs = fields.fields_in(raw, layout.bits, layout.word_bits, per_word * raw.shape[-1])
        found = runs.unflatten(-1, (-1, per_word)).flip(-1).flatten(-2)[..., : fields.extent_along(shape, layout)]
        return fields.codes_of(found, layout, element)
