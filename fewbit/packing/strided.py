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
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.numerics.cast import code_dtype
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

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
        fields = FIELDS[layout.bits, layout.word_bits]
        raw = codes.view(torch.uint8) if codes.dtype.is_floating_point else codes
        raw = raw.to(torch.int32).flatten(-2) & ((1 << layout.bits) - 1)
        parts = torch.nn.functional.pad(raw, (0, -raw.shape[-1] % fields)).unflatten(-1, (fields, -1))
        words = parts.new_zeros(*parts.shape[:-2], parts.shape[-1])
        for field in range(fields):
            words |= parts[..., field, :] << layout.bits * (fields - 1 - field)
        return words if layout.word_bits == 32 else words.to(torch.uint8)

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        fields = FIELDS[layout.bits, layout.word_bits]
        shifts = torch.arange(fields - 1, -1, -1, device=words.device, dtype=torch.int32) * layout.bits
        parts = (words.to(torch.int32)[..., None, :] >> shifts[:, None]) & ((1 << layout.bits) - 1)
        codes = parts.flatten(-2)[..., : prod(shape[-2:])].reshape(shape)
        dtype = code_dtype(element)
        if dtype is torch.int8:
            half = 1 << (layout.bits - 1)
            codes = (codes ^ half) - half  # the sign of a two's complement field
        return codes.to(torch.uint8).view(dtype) if dtype.is_floating_point else codes.to(dtype)
