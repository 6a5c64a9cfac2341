"""Bytes filled from their highest bit: codes of a flattened matrix, the first of a byte in its high bits.

Code i of the row-major matrix [N, K] lies in byte i * bits // 8, the lower i the higher its bits, and rows share a byte
where K asks for it. This is bitsandbytes' layout of 4-bit codes, whose words are [ceil(N * K / 2)]. Source: formats.md
section 9 of the house's references.
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


class BigEndian(Packing):
    """See the head of this file."""

    name: ClassVar[str] = "big-endian"

    def packed_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        if layout != Layout(self.name, layout.bits, "K", 8) or layout.bits not in (1, 2, 4):
            raise ShapeError(
                f"Bytes filled from the highest bit hold plain codes of 1, 2 or 4 bits along K, found {layout}.",
                "Use another packing.",
            )
        return (*shape[:-2], -(-prod(shape[-2:]) * layout.bits // 8))

    def pack(self, codes: Tensor, layout: Layout) -> Tensor:
        fields = (codes & ((1 << layout.bits) - 1)).to(torch.uint8).flatten(-2)
        per_byte = 8 // layout.bits
        fields = torch.nn.functional.pad(fields, (0, -fields.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte))
        words = fields.new_zeros(fields.shape[:-1])
        for position in range(per_byte):
            words |= fields[..., position] << (8 - layout.bits * (position + 1))
        return words

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        shifts = torch.arange(8 - layout.bits, -1, -layout.bits, device=words.device, dtype=torch.uint8)
        fields = (words[..., None] >> shifts) & ((1 << layout.bits) - 1)
        fields = fields.flatten(-2)[..., : prod(shape[-2:])].reshape(shape)
        if code_dtype(element) is torch.int8:
            half = 1 << (layout.bits - 1)
            return (fields.to(torch.int8) ^ half) - half  # the sign of a two's complement field
        return fields
