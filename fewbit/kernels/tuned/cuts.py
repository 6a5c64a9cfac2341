"""Measuring cuts of products over weight fragments: the candidates for a number of rows, compiled ahead, timed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.linear.fragment_cuts import FEWEST_STAGES, Cut, cut_for, cut_in
from fewbit.kernels.linear.fragment_layout import FragmentLayout, fragment_layout_of
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.table import Table
from fewbit.kernels.tuned.tune import fastest_ways
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware

OPERANDS = {"cuda_wgmma": None, "cuda_wgmma_fp8": E4M3.name}
"""Kernels over fragments -> what tensor cores multiply, see `fragment_layout_of`."""
BLOCKS = {
    8: ((2, 2), (2, 1), (1, 2)),
    16: ((2, 2), (2, 1)),
    32: ((2, 2), (2, 1), (4, 1)),
    64: ((2, 2), (2, 1), (4, 1), (3, 1)),
    128: ((2, 1), (3, 1), (2, 2)),
    192: ((2, 1),),
    256: ((2, 1),),
}
"""Tokens of a block -> warpgroups and tiles of each; where groups are summed, two tiles take twice the registers."""
MOST_OF_GROUPS = {(2, 2): 64, (4, 1): 64, (3, 1): 128, (2, 1): 192, (1, 2): 64}
MOST_STAGES = 16
FEW = 32
"""Tokens up to which two blocks have room on a multiprocessor."""
DECODES_FIRST_FROM = 1024
_WIDTHS, _WIDTHS_OF_GROUPS = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64, 128, 192)


def cut_candidates(layout: FragmentLayout, tokens: int) -> Iterator[Cut]:
    """Cuts worth timing for a product of so many rows."""
    decoding = layout.decoding
    widths = _WIDTHS_OF_GROUPS if decoding.sums_groups else _WIDTHS
    last = next((index for index, width in enumerate(widths) if width >= tokens), len(widths) - 1)
    if tokens >= DECODES_FIRST_FROM:
        yield Cut(widths[-1], stages=FEWEST_STAGES, decodes_first=True).fitted(layout)
    for width in widths[last - 1 if tokens > 64 else last : last + 1]:
        for warpgroups, tiles in BLOCKS[width]:
            if decoding.sums_groups and width > MOST_OF_GROUPS[warpgroups, tiles]:
                continue
            base = Cut(width, warpgroups, tiles, MOST_STAGES)
            options = [base]
            if tokens <= FEW and warpgroups == 2 and not decoding.is_fp8:
                options.append(replace(base, residents=2, even=False))
            if width >= FEW and not decoding.is_fp8:
                options.append(replace(base, step=4))
            fitted = (option.fitted(layout) for option in options)
            yield from (option for option in fitted if option.stages >= FEWEST_STAGES)


def compile_on_all_cores(compile_one: Callable[..., bytes], jobs: Iterable[tuple[Any, ...]]) -> None:
    """Compiles kernels in a process to each core, into the folder that this process reads."""
    distinct = list(dict.fromkeys(jobs))
    count = min(len(os.sched_getaffinity(0)), len(distinct))
    if count:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_one, *zip(*distinct, strict=True)))


def tune_cuts(
    request: LinearRequest, hardware: Hardware, ladder: Iterable[int], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The fastest cut at every M of the ladder for each kernel over fragments that takes the request, for a table."""
    found: list[dict[str, Any]] = []
    for name, operand in OPERANDS.items():
        kernel = linear_kernels()[name]
        layout = fragment_layout_of(request, operand) if kernel.refuse(request, hardware) is None else None
        if layout is not None:
            found += _tuned(request, kernel, layout, list(ladder), say)
    return found


def _tuned(
    request: LinearRequest, kernel: LinearKernel, layout: FragmentLayout, ladder: list[int], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    from fewbit.kernels.cuda.products import product_code

    candidates = {tokens: list(dict.fromkeys(cut_candidates(layout, tokens))) for tokens in ladder}
    compiled = (cut for cuts in candidates.values() for cut in cuts if not cut.decodes_first)
    compile_on_all_cores(product_code, ((layout.decoding, cut) for cut in compiled))
    return fastest_ways(request, kernel, layout, cut_for, candidates, say, "cut")


def cutter_of(table: Table) -> Callable[[FragmentLayout, int, str], Cut]:
    """Takes cuts from one table, or by rule."""
    return lambda layout, tokens, _device: cut_in(table, layout, tokens)
