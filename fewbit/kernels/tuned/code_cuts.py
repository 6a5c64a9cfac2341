"""Measuring cuts of products of 8-bit codes in CUDA C++: the candidates for a number of rows, compiled ahead, timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.code_cuts import (
    FEW,
    INSTRUCTION,
    MOST_STAGES,
    CodeCut,
    block_rows,
    block_tokens,
    code_cut_for,
    code_cut_in,
)
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.cuts import compile_on_all_cores
from fewbit.kernels.tuned.table import Table
from fewbit.kernels.tuned.tune import fastest_ways
from fewbit.spec.hardware import Hardware

OPERANDS = {"cuda_fp8": "e4m3", "cuda_int8": "int8"}
"""Kernels over codes -> what tensor cores multiply."""
FEWEST_STAGES = 2
NARROW = 96
"""Output features of a block up to which several lines have room in a stage."""
SHARED_ROWS = 16  # of which each block of two takes whole groups of eight
DIVIDED = {128: (64, 128), 256: (128, 192, 256)}
"""Tokens -> output features of tiles that several blocks have parts of."""


def code_cut_candidates(layout: ProductLayout, tokens: int) -> Iterator[CodeCut]:
    """Cuts worth timing for a product of so many rows, and the product elsewhere."""
    yield CodeCut(elsewhere=True)
    found = _of_few(layout, tokens) if tokens <= FEW else _of_many(layout, tokens)
    fitted = (cut.fitted() for cut in found)
    yield from dict.fromkeys(cut for cut in fitted if cut.stages >= FEWEST_STAGES)


def _of_few(layout: ProductLayout, tokens: int) -> Iterator[CodeCut]:
    width, rows = block_tokens(tokens), block_rows(layout.rows, 1)
    for lines, warpgroups in ((2, 2), (4, 2)) if rows <= NARROW else ((1, 1), (1, 2)):
        cut = CodeCut(width, rows, lines, MOST_STAGES, warpgroups)
        yield cut
        if width > INSTRUCTION // 4 and rows <= NARROW:
            yield replace(cut, cluster=2)
    if rows <= NARROW:
        yield CodeCut(width, INSTRUCTION, 2, MOST_STAGES, 2, whole=False)


def _of_many(layout: ProductLayout, tokens: int) -> Iterator[CodeCut]:
    width = block_tokens(tokens)
    rows = block_rows(layout.rows, -(-tokens // width))
    for shares_weight in (False, True) if rows % SHARED_ROWS == 0 else (False,):
        cut = CodeCut(width, rows, 1, MOST_STAGES, 2, 2, shares_weight)
        yield cut
    for height in DIVIDED.get(tokens, ()):
        yield CodeCut(width, height, 1, MOST_STAGES, 2, 2, tokens > width, whole=False)


def tune_code_cuts(
    request: LinearRequest, hardware: Hardware, ladder: Iterable[int], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The fastest cut at every M of the ladder for the kernel over codes that takes the request, for a table."""
    from fewbit.kernels.cuda.code_products import product_code

    found: list[dict[str, Any]] = []
    for name, operand in OPERANDS.items():
        kernel = linear_kernels()[name]
        layout = product_layout_of(request, operand) if kernel.refuse(request, hardware) is None else None
        if layout is None or request.key.activation is None:
            continue
        half, zeros = request.dtype == "f16", not request.key.activation.symmetric
        candidates = {tokens: list(code_cut_candidates(layout, tokens)) for tokens in ladder}
        compiled = (cut for cuts in candidates.values() for cut in cuts if not cut.elsewhere)
        compile_on_all_cores(product_code, ((operand, half, zeros, cut) for cut in compiled))
        found += fastest_ways(request, kernel, layout, code_cut_for, candidates, say, "cut")
    return found


def code_cutter_of(table: Table) -> Callable[[ProductLayout, int, str], CodeCut]:
    """Takes cuts from one table, or by rule."""
    return lambda layout, tokens, _device: code_cut_in(table, layout, tokens)
