"""Planar words: the bits of 32 codes split into planes of 4, 2 and 1 bits, each plane dense by itself.

32 codes of b bits fill b words of 32 bits. The planes lie low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 +
1. A width that is one plane (2, 4) is the dense layout, and so is 8, which is kept whole. Codes come in runs of 32 and
no run is cut. GPTQModel calls this `gptq_p` (7.7.0); source: formats.md section 1.
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

RUN = 32
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


class Planar(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "planar"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout.word_bits != 32 or layout.bits not in _PLANES:
            raise ShapeError(
                f"There are no planar words of {layout.word_bits} bits that hold codes of {layout.bits} bits.",
                "Use 2 to 8 bits in words of 32.",
            )
        count = fields.extent_along(shape, layout)
        if count % RUN:
            raise ShapeError(
                f"Planar words hold runs of {RUN} codes, found {count} along {layout.axis}.", "Use dense words."
            )
        return fields.shape_with(count // RUN * layout.bits, shape, layout)

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        runs = fields.fields_of(codes, layout).unflatten(-1, (-1, RUN))
        planes, shift = [], 0
        for bits in _PLANES[layout.bits]:
            planes.append(fields.words_of((runs >> shift) & ((1 << bits) - 1), bits, 32))
            shift += bits
        return fields.stored(torch.cat(planes, -1).flatten(-2), layout)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        runs = fields.raw(words, layout).unflatten(-1, (-1, layout.bits))
        found, shift = torch.zeros(*runs.shape[:-1], RUN, dtype=torch.int64, device=words.device), 0
        for bits in _PLANES[layout.bits]:
            # A plane of `bits` bits takes that many words of a run, after those of the planes below it.
            found |= fields.fields_in(runs[..., shift : shift + bits], bits, 32, RUN) << shift
            shift += bits
        return fields.codes_of(found.flatten(-2), layout, element)
