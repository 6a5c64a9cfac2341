"""From float32 sums of a block [BLOCK_N, BLOCK_M] to outputs, where one program made them and where several did."""

from __future__ import annotations

import triton
from triton import language as tl


@triton.jit
def share(
    total, n, m, tile, program, units, chunk, row_scale, x_scale, x_zero, weight_sums, bias, out, partials, counters,
    M, N, HAS_BIAS: tl.constexpr, X_SCALES: tl.constexpr, X_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Stores a program's part of a block; the last of the block's programs adds the parts in order and finishes."""
    first = tile * units // chunk
    parts = ((tile + 1) * units - 1) // chunk - first + 1
    if parts > 1:
        size = M.to(tl.int64) * N
        inside = (m < M)[None, :] & (n < N)[:, None]
        place = m.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(partials + (program - first) * size + place, total, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == parts - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(parts):
                total += tl.load(partials + part * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            finish(total, n, m, row_scale, x_scale, x_zero, weight_sums, bias, out, M, N, HAS_BIAS, X_SCALES, X_ZEROS)
            tl.store(counters + tile, 0)
    else:
        finish(total, n, m, row_scale, x_scale, x_zero, weight_sums, bias, out, M, N, HAS_BIAS, X_SCALES, X_ZEROS)


@triton.jit
def finish(
    total, n, m, row_scale, x_scale, x_zero, weight_sums, bias, out, M, N, HAS_BIAS: tl.constexpr,
    X_SCALES: tl.constexpr, X_ZEROS: tl.constexpr,
):  # fmt: skip
    """Scales rows and tokens, adds the bias, rounds once and stores.

    Args:
        X_SCALES: `tokens` or `one` where x counts in units of scales, else `none`.
        X_ZEROS: the same for codes of zero that were not taken from x; `weight_sums` holds the sum of each row of W,
            before `row_scale`.
    """
    if X_ZEROS != "none":
        sums = tl.load(weight_sums + n, mask=n < N, other=0.0)[:, None]
        if X_ZEROS == "tokens":
            total -= sums * tl.load(x_zero + m, mask=m < M, other=0.0)[None, :]
        else:
            total -= sums * tl.load(x_zero)
    total = total * tl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    if X_SCALES == "tokens":
        total = total * tl.load(x_scale + m, mask=m < M, other=0.0)[None, :]
    if X_SCALES == "one":
        total = total * tl.load(x_scale)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
