"""Interleaved words: eight 4-bit codes in an int32 word, even ones in the low half, odd ones in the high half.

Nibble i, lowest first, holds code `ORDER[i]` of its eight, so that one shift and one mask give two codes in the two
halves of a 32-bit register. The last word of a run is padded with zero fields. AutoAWQ's gemm layout along N, and
Quark's `reorder`. Source: formats.md sections 2 and 5.
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

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight consecutive codes each nibble of a word holds."""


class Interleaved(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "interleaved"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if (layout.bits, layout.word_bits) != (4, 32):
            raise ShapeError(
                f"There are no interleaved words of {layout.word_bits} bits that hold codes of {layout.bits} bits.",
                "Use 4 bits in words of 32.",
            )
        return fields.shape_with(-(-fields.extent_along(shape, layout) // len(ORDER)), shape, layout)

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        found = fields.fields_of(codes, layout)
        eights = torch.nn.functional.pad(found, (0, -found.shape[-1] % len(ORDER))).unflatten(-1, (-1, len(ORDER)))
        return fields.stored(fields.words_of(eights[..., list(ORDER)].flatten(-2), 4, 32), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        raw = fields.raw(words, layout)
        eights = fields.fields_in(raw, 4, 32, len(ORDER) * raw.shape[-1]).unflatten(-1, (-1, len(ORDER)))
        back = torch.tensor(ORDER, device=words.device).argsort()
        found = eights[..., back].flatten(-2)[..., : fields.extent_along(shape, layout)]
        return fields.codes_of(found, layout, element)
