"""Strided fields: a flattened matrix cut into as many equal parts as a word has fields, one part to each field.

With F fields to a word and L = ceil(N * K / F) words, code i of the row-major matrix [N, K] lies in word i mod L, in
field i // L, the first field in the highest of the F * bits bits that a word uses. Fields beyond the last code are
zero; more words than L are legal when unpacking, and L is then their number.

This is HQQ's layout for either axis: it packs a reshaped matrix by halves, quarters or tenths of its rows, which are
parts of the flattened one. 1, 2, 4 and 8 bits lie in bytes, 3 bits ten at a time in the low 30 bits of int32. Source:
formats.md section 9 of the house's references.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.lazy import torch
from fewbit.packing.fields import codes_of, fields_of, word_dtype
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

FIELDS = {(1, 8): 8, (2, 8): 4, (4, 8): 2, (8, 8): 1, (3, 32): 10}
"""(bits, word bits) -> fields of a word."""


class Strided(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "strided"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        width = (layout.bits, layout.word_bits)
        if width not in FIELDS or layout != Layout(self.name, layout.bits, "K", layout.word_bits):
            raise ShapeError(
                f"Strided fields hold plain codes of 1, 2, 4 or 8 bits in bytes and 3 in 32, along K, found {layout}.",
                "Use another packing.",
            )
        return (*shape[:-2], -(-prod(shape[-2:]) // FIELDS[width]))

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        count = FIELDS[layout.bits, layout.word_bits]
        flat = fields_of(codes, layout).to(torch.int32).flatten(-2)
        parts = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % count)).unflatten(-1, (count, -1))
        words = parts.new_zeros(*parts.shape[:-2], parts.shape[-1])
        for field in range(count):
            words |= parts[..., field, :] << layout.bits * (count - 1 - field)
        return words.to(word_dtype(layout.word_bits))

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        count = FIELDS[layout.bits, layout.word_bits]
        shifts = torch.arange(count - 1, -1, -1, device=words.device, dtype=torch.int32) * layout.bits
        parts = (words.to(torch.int32)[..., None, :] >> shifts[:, None]) & ((1 << layout.bits) - 1)
        return codes_of(parts.flatten(-2)[..., : prod(shape[-2:])].reshape(shape), layout, element)
