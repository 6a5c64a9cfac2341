"""How a product over weight tiles is cut into programs, by shape and M."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fewbit.kernels.linear.weight_tiles import TILE_ROWS, TileLayout

MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Plan:
    """One way to run a product.

    Attributes:
        block_n, block_m: outputs of a program; block_n divides or is a multiple of the tile's rows.
        warps, stages: of a program; stages of words in flight.
        split: parts of K, summed in order.
        decodes_first: decode the whole weight, then let the vendor's library multiply.
    """

    block_n: int = TILE_ROWS
    block_m: int = 16
    warps: int = 4
    stages: int = 4
    split: int = 1
    decodes_first: bool = False


@cache
def plan_for(layout: TileLayout, tokens: int, device: str) -> Plan:
    """The plan for a product of `tokens` rows on a device of that name."""
    if tokens > 256:
        return Plan(decodes_first=True)
    block_m = next(size for size in (16, 32, 64) if tokens <= size or size == 64)
    block_n = 128 if layout.padded_rows % 128 == 0 and layout.padded_rows >= 16384 else 64
    blocks = layout.padded_rows // block_n * -(-tokens // block_m)
    split = max(1, min(layout.units, 16, 4 * MULTIPROCESSORS // blocks))
    return Plan(block_n, block_m, 4, 4, split)
