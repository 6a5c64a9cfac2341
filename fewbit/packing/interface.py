"""The contract of a packing: an inverse pair between codes and stored words, one file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class Packing(ABC):
    """Turns codes [..., N, K] into stored words and back.

    `unpack(pack(codes)) == codes` for every code of the element and every shape and layout that `packed_shape` accepts;
    a generic test holds every registered packing to it.
    """

    name: ClassVar[str]
    """What `Layout.packing` says."""

    @abstractmethod
    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """Shape of the stored words of codes of `shape`.

        Raises:
            ShapeError: this packing does not hold codes of that shape, or has no such layout.
        """

    @abstractmethod
    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        """Stored words of `codes` [..., N, K], codes in the dtype that `numerics.code_dtype` says."""

    @abstractmethod
    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        """Codes of `shape` [..., N, K] from stored words, in the dtype that `numerics.code_dtype` says."""
