"""Bytes filled from their highest bit: codes of a flattened matrix, the first of a byte in its high bits.

Code i of the row-major matrix [N, K] lies in byte i * bits // 8, the lower i the higher its bits, and rows share a byte
where K asks for it. This is bitsandbytes' layout of 4-bit codes, whose words are [ceil(N * K / 2)]. Source: formats.md
section 9 of the house's references.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, ClassVar

from fewbit.errors import ShapeError
from fewbit.lazy import torch
from fewbit.packing.fields import codes_of, fields_of
from fewbit.packing.interface import Packing
from fewbit.spec.element import Element
from fewbit.spec.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


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
        flat = fields_of(codes, layout).to(torch.uint8).flatten(-2)
        per_byte = 8 // layout.bits
        parts = torch.nn.functional.pad(flat, (0, -flat.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte))
        words = parts.new_zeros(parts.shape[:-1])
        for position in range(per_byte):
            words |= parts[..., position] << (8 - layout.bits * (position + 1))
        return words

    def unpack(self, words: Tensor, layout: Layout, element: Element, shape: tuple[int, ...]) -> Tensor:
        shifts = torch.arange(8 - layout.bits, -1, -layout.bits, device=words.device, dtype=torch.uint8)
        parts = (words[..., None] >> shifts) & ((1 << layout.bits) - 1)
        flat = parts.flatten(-2)[..., : prod(shape[-2:])].to(torch.int32)
        return codes_of(flat.reshape(shape), layout, element)
