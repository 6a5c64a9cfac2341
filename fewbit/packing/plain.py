"""The plain layout: one code per element of the tensor, nothing packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import PLAIN, Layout

if TYPE_CHECKING:
    from torch import Tensor


class Plain(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "plain"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout != PLAIN:
            raise ShapeError(f"The plain packing has no bits, words or offsets, found {layout}.", "Use PLAIN.")
        return shape

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        return codes

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        return words
