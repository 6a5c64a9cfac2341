"""The plain layout: one code per element of the tensor, nothing packed."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout


class Plain(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "plain"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return shape

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        return codes

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        return words
