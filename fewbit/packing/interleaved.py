"""Dense words whose codes lie in another order, or whose matrix is stored transposed.

The words of `dense`, with two freedoms: position p of a word holds code `order[p]` of the word's run, and the packed
matrix [..., N, W] may be stored as [..., W, N]. A run that does not fill its last word is padded with zero fields.

    transposed              natural order, transposed              Quark int4 per group packed in order, int8 per group
    interleaved             0 2 4 6 1 3 5 7, as it is              Quark int4 per channel
    interleaved_transposed  0 2 4 6 1 3 5 7, transposed            Quark int4 per group; AWQ gemm
    reversed_transposed     first code in the high bits, transposed     Quark uint2 per group

The interleaved order is the one in which GPUs of the AWQ kernels read half words. Sources: formats.md sections 0, 2
and 5; amd-quark 0.13.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.numerics.cast import code_dtype
from fewbit.packing.dense import Dense
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

_DENSE = Dense()


class _Reordered(Packing):
    """Dense words with an order of their codes, transposed or not."""

    transposed: ClassVar[bool]

    @abstractmethod
    def order(self, codes_per_word: int) -> tuple[int, ...] | None:
        """Which code of its run each position of a word holds, lowest bits first; None where there is no such order."""

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        packed = _DENSE.packed_shape(shape, layout)
        whole, rest = divmod(layout.word_bits, layout.bits)
        if rest or self.order(whole) is None:
            raise ShapeError(
                f"{self.name} words of {layout.word_bits} bits do not hold codes of {layout.bits} bits.",
                "Use the dense packing.",
            )
        return (*packed[:-2], packed[-1], packed[-2]) if self.transposed else packed

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        fields = (codes.view(torch.uint8) if codes.dtype.is_floating_point else codes).to(torch.int64)
        axis = _axis(layout)
        missing = -fields.shape[axis] % self._codes_per_word(layout)
        if missing:
            shape = list(fields.shape)
            shape[axis] = missing
            zero = -layout.offset  # the code that becomes a zero field
            fields = torch.cat([fields, fields.new_full(shape, zero)], axis)
        words = _DENSE.pack(self._permuted(fields, layout, inverse=False), layout)
        return words.transpose(-1, -2).contiguous() if self.transposed else words

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        axis, count = _axis(layout), self._codes_per_word(layout)
        padded = list(shape)
        padded[axis] += -padded[axis] % count
        plain = words.transpose(-1, -2) if self.transposed else words
        codes = _DENSE.unpack(plain, layout, element, tuple(padded))
        raw = codes.view(torch.uint8) if codes.dtype.is_floating_point else codes
        ordered = self._permuted(raw, layout, inverse=True).narrow(axis, 0, shape[axis]).contiguous()
        return ordered.view(code_dtype(element))

    def _codes_per_word(self, layout: Layout) -> int:
        return layout.word_bits // layout.bits

    def _permuted(self, codes: Tensor, layout: Layout, inverse: bool) -> Tensor:
        """Codes moved inside each word's run: to the positions that hold them, or back."""
        count, axis = self._codes_per_word(layout), _axis(layout)
        order = self.order(count)
        assert order is not None, "packed_shape refuses this layout"
        index = torch.tensor(order, device=codes.device)
        index = index.argsort() if inverse else index
        return codes.unflatten(axis, (-1, count)).index_select(axis, index).flatten(axis - 1, axis)


class Transposed(_Reordered):
    """See the head of this file."""

    name: ClassVar[str] = "transposed"
    transposed: ClassVar[bool] = True

    def order(self, codes_per_word: int) -> tuple[int, ...] | None:
        return tuple(range(codes_per_word))


class Interleaved(_Reordered):
    """See the head of this file."""

    name: ClassVar[str] = "interleaved"
    transposed: ClassVar[bool] = False

    def order(self, codes_per_word: int) -> tuple[int, ...] | None:
        return _EVEN_THEN_ODD if codes_per_word == len(_EVEN_THEN_ODD) else None


class InterleavedTransposed(Interleaved):
    """See the head of this file."""

    name: ClassVar[str] = "interleaved_transposed"
    transposed: ClassVar[bool] = True


class ReversedTransposed(_Reordered):
    """See the head of this file."""

    name: ClassVar[str] = "reversed_transposed"
    transposed: ClassVar[bool] = True

    def order(self, codes_per_word: int) -> tuple[int, ...] | None:
        return tuple(reversed(range(codes_per_word)))


_EVEN_THEN_ODD = (0, 2, 4, 6, 1, 3, 5, 7)


def _axis(layout: Layout) -> int:
    return -1 if layout.axis == "K" else -2
