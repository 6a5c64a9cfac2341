"""Plans worth timing for a product of so many rows, by the kind of its layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from fewbit.kernels.linear.product_layout import ProductLayout
from fewbit.kernels.linear.tile_plans import Plan, WeightLayout, is_possible
from fewbit.kernels.linear.vendor_products import runs_on_hopper_alone, vendor_multiplies
from fewbit.kernels.linear.weight_tiles import TileLayout

BLOCKS = {
    8: ((32, 2), (64, 1), (64, 2), (64, 4), (128, 2), (128, 4)),
    16: ((64, 4), (128, 4), (256, 8)),
    32: ((64, 4), (128, 4), (128, 8)),
    64: ((64, 4), (128, 4), (128, 8)),
    128: ((64, 4), (128, 8), (256, 8)),
    256: ((64, 4), (64, 8), (128, 8)),
}
"""Columns of a block -> its rows of the weight, and warps."""
STAGES = {8: (3, 4, 6), 16: (3, 4), 32: (3, 4), 64: (2, 3, 4), 128: (2, 3), 256: (2, 3)}
PER_MULTIPROCESSOR = (1, 2, 3, 4, 6, 8)
"""Programs to a multiprocessor that are tried."""
PARTS = (2, 4, 8)
"""Programs to a block that are tried."""
MOST_PER_MULTIPROCESSOR = 13
DECODES_FIRST_FROM = 128
FUSED_UP_TO = 512
PRODUCT_BLOCKS = {
    8: ((64, 4), (128, 8)),
    16: ((64, 4), (128, 8)),
    32: ((64, 4), (128, 8)),
    64: ((64, 4), (128, 4), (128, 8)),
    128: ((64, 4), (128, 4), (128, 8)),
    256: ((64, 4), (64, 8)),
}
"""The same for products of 8-bit codes."""
PRODUCT_STAGES = {8: (6,), 16: (4, 6), 32: (4, 6), 64: (3, 4), 128: (3, 4), 256: (3,)}
LINES_AHEAD = {8: (4,), 16: (0, 4), 32: (0, 4)}
FOLDED = ((128, 32, 8, 3), (64, 64, 4, 3), (256, 64, 8, 3), (128, 128, 8, 3))
"""Rows and columns of a block and warps and stages where scales multiply decoded numbers: the sums take no registers
beside those of the block, so that it may be larger and x is read fewer times."""
DESCRIBED = {
    32: ((64, 4, 6), (128, 4, 4)),
    64: ((64, 4, 4), (64, 4, 6), (128, 4, 4)),
    128: ((64, 4, 4), (128, 4, 3), (128, 8, 4)),
    256: ((64, 4, 3), (128, 8, 3)),
}
"""Columns of a block -> its rows, warps and stages, for codes that are read through descriptors."""
DESCRIBED_FROM = 17
DESCRIBED_PROGRAMS = (1, 2)
"""Programs to a multiprocessor, which take whole blocks in turn or equal chunks."""
DEEP = ((64, 8, 4, 6, 256), (128, 16, 8, 3, 256), (64, 16, 4, 3, 512), (32, 8, 4, 4, 512))
"""Rows and columns of a block, warps, stages and bytes at a time where several lines of a row of codes are read."""
DEEP_UP_TO = 16
DECODED_BLOCKS = ((128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 3), (256, 128, 8, 3))
"""Blocks and warps and stages for weights that were decoded first."""


def _vendor_has(layout: ProductLayout) -> bool:
    """Whether torch multiplies such codes on this device."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return vendor_multiplies(layout) and (here or not runs_on_hopper_alone(layout))


def _may_describe(layout: ProductLayout) -> bool:
    """Whether the program that reads through descriptors multiplies the layout on this device."""
    here = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return here and layout.is_described


def candidates(layout: WeightLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    """Plans worth timing for a product of `tokens` rows."""
    if isinstance(layout, ProductLayout):
        yield from _of_products(layout, tokens, multiprocessors)
    else:
        yield from _of_tiles(layout, tokens, multiprocessors)


def _of_products(layout: ProductLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    if _vendor_has(layout):
        yield Plan(decodes_first=True)
    elif layout.kind != "codes" and tokens >= DECODES_FIRST_FROM:
        blocks = DECODED_BLOCKS[:1] if _vendor_has(layout.decoded()) else DECODED_BLOCKS
        yield from (Plan(*block, decodes_first=True) for block in blocks)
    if _may_describe(layout) and tokens >= DESCRIBED_FROM:
        yield from _described(layout, tokens, multiprocessors)
    if layout.is_described and tokens <= DEEP_UP_TO:
        yield from _deep(layout, tokens, multiprocessors)
    widest = next((width for width in PRODUCT_BLOCKS if width >= tokens), max(PRODUCT_BLOCKS))
    widths = [width for width in PRODUCT_BLOCKS if width <= widest]
    for block_m in [8, 16] if widest == 8 else widths[-1:] if widest <= 64 else widths[-3:]:
        several = product(PRODUCT_BLOCKS[block_m], PRODUCT_STAGES[block_m], LINES_AHEAD.get(block_m, (0,)))
        for (block_n, warps), stages, ahead in several:
            blocks = -(-layout.rows // block_n) * -(-tokens // block_m)
            counts = {0}
            if blocks < 3 * multiprocessors:
                counts |= {multiprocessors * many for many in (1, 2, 3)} | {blocks * many for many in (2, 4)}
            for programs in sorted(counts):
                if programs <= min(blocks * layout.units, multiprocessors * MOST_PER_MULTIPROCESSOR):
                    yield Plan(block_n, block_m, warps, stages, programs, ahead=ahead)


def _described(layout: ProductLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    widest = next((width for width in DESCRIBED if width >= tokens), max(DESCRIBED))
    for block_m in [width for width in DESCRIBED if width <= widest][-3:]:
        for (block_n, warps, stages), many in product(DESCRIBED[block_m], DESCRIBED_PROGRAMS):
            plan = Plan(block_n, block_m, warps, stages, many * multiprocessors, described=True)
            yield plan
            if -(-layout.rows // block_n) * -(-tokens // block_m) < 3 * multiprocessors:
                yield replace(plan, splits=True)


def _deep(layout: ProductLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    for block_n, block_m, warps, stages, depth in DEEP:
        if layout.width % depth == 0 and block_m >= tokens:
            units = layout.width // depth * -(-layout.rows // block_n) * -(-tokens // block_m)
            for programs in (0, multiprocessors, 2 * multiprocessors):
                if programs <= units:
                    yield Plan(block_n, block_m, warps, stages, programs, ahead=4, depth=depth)


def _of_tiles(layout: TileLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    if tokens >= DECODES_FIRST_FROM:
        yield Plan(decodes_first=True)
    if tokens > FUSED_UP_TO:
        return
    for block_n, block_m, warps, stages in FOLDED:
        if block_m >= min(tokens, 32) and block_m < 4 * tokens and layout.can_fold(torch.bfloat16) and tokens > 16:
            blocks = layout.padded_rows // block_n * -(-tokens // block_m)
            for programs in (0, multiprocessors, 2 * multiprocessors):
                plan = Plan(block_n, block_m, warps, stages, programs, folds=True)
                if programs <= blocks * layout.units and is_possible(plan, layout):
                    yield plan
    widths = [width for width in BLOCKS if width >= tokens][:1] or list(BLOCKS)[-1:]
    smaller = [width for width in BLOCKS if 32 <= width < widths[0]][-2:]
    for block_m in [*smaller, *widths]:
        for (block_n, warps), stages in product(BLOCKS[block_m], STAGES[block_m]):
            blocks = layout.padded_rows // block_n * -(-tokens // block_m)
            counts = {0} | {multiprocessors * many for many in PER_MULTIPROCESSOR} | {blocks * many for many in PARTS}
            for programs in sorted(counts):
                fits = programs <= min(blocks * layout.units, multiprocessors * MOST_PER_MULTIPROCESSOR)
                plan = Plan(block_n, block_m, warps, stages, programs)
                if fits and is_possible(plan, layout):
                    yield plan
