"""y = x @ W.T + bias on 8-bit tensor cores: codes of x, codes of W or pairs of 4-bit codes decoded in registers.

INT8 products are summed in 32 bits over the whole of K where no scale lies between. FP8 products are summed by the
tensor cores over one unit of at most 128 input features and from there in float32, because Hopper's keep no more than
some 14 bits; scales of groups, of either side, multiply these sums.

The work is cut as in `weight_only`: into equal chunks of consecutive units, which several programs may share a block
for, or one block a program. W is the left operand, so M is the narrow side.
"""

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fewbit.kernels.programs.decode import beside
from fewbit.kernels.programs.fetch import fetch_ahead
from fewbit.kernels.programs.nibbles import both_runs, e2m1_runs
from fewbit.kernels.programs.outputs import finish, share

BLOCKS_TOGETHER = tl.constexpr(8)  # blocks of M that are near in time, so that both sides come from the cache


@triton.jit
def block_of(tile, tiles_n, tiles_m):
    """Which block of N and which of M a tile is."""
    together = BLOCKS_TOGETHER * tiles_n
    first = tile // together * BLOCKS_TOGETHER
    height = tl.minimum(tiles_m - first, BLOCKS_TOGETHER)
    inside = tile % together
    return inside // height, first + inside % height


# Not specialized by these numbers: every M would be a compilation of its own.
@triton.jit(do_not_specialize=["M", "units", "chunk"])
def multiply_codes(
    x, weight, scale, row_scale, x_scale, x_zero, weight_sums, bias, out, partials, counters,
    M, N, width, stride, units, chunk,
    KIND: tl.constexpr, OPERAND: tl.constexpr, RUN: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr,
    X_GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PACKED: tl.constexpr, CHAINED: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, X_SCALES: tl.constexpr,
    X_ZEROS: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """`chunk` consecutive steps of the work, which is every unit of K of every block of outputs [BLOCK_N, BLOCK_M].

    Args:
        x: codes [M, width]; with scales [groups, M] where `X_GROUP` is not 0, else as `X_SCALES` says.
        weight: bytes [N, stride], with scales [groups, N] where `GROUP` is not 0; where `FOLDS`, `scale` holds offsets.
        WHOLE: a chunk is the whole of one block.
        CHAINED: the launch may begin before the kernel before it ends, and the next one before this ends.
        AHEAD: lines of 128 bytes of each row that are fetched meanwhile: the kernel before makes x, not the weight.
        FOLDS: whether FP4 holds its scales, see `sum_of_folded`.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    begin = program * chunk
    end = tl.minimum(begin + chunk, tiles_n * tiles_m * units)
    if CHAINED:
        gdc_launch_dependents()
        if AHEAD > 0:
            block_n, block_m = block_of(begin // units, tiles_n, tiles_m)
            row = tl.minimum(block_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            lines = tl.minimum((begin % units) * RUN + tl.arange(0, AHEAD) * 128, stride - 1)
            fetch_ahead(weight + row.to(tl.int64)[:, None] * stride + lines[None, :])
        gdc_wait()
    if WHOLE:
        block_n, block_m = block_of(program, tiles_n, tiles_m)
        n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
        total = sum_of_codes(
            x, weight, scale, x_scale, n, m, M, N, width, stride, 0, units, KIND, OPERAND, RUN, FIELDS, GROUP, X_GROUP,
            BLOCK_N, BLOCK_M, STAGES, PACKED, FOLDS,
        )  # fmt: skip
        finish(total, n, m, row_scale, x_scale, x_zero, weight_sums, bias, out, M, N, HAS_BIAS, X_SCALES, X_ZEROS)
    else:
        for tile in range(begin // units, tl.cdiv(end, units)):
            block_n, block_m = block_of(tile, tiles_n, tiles_m)
            n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
            total = sum_of_codes(
                x, weight, scale, x_scale, n, m, M, N, width, stride,
                tl.maximum(begin - tile * units, 0), tl.minimum(end - tile * units, units),
                KIND, OPERAND, RUN, FIELDS, GROUP, X_GROUP, BLOCK_N, BLOCK_M, STAGES, PACKED, FOLDS,
            )  # fmt: skip
            share(
                total, n, m, tile, program, units, chunk, row_scale, x_scale, x_zero, weight_sums, bias, out, partials,
                counters, M, N, HAS_BIAS, X_SCALES, X_ZEROS, BLOCK_N, BLOCK_M,
            )  # fmt: skip


DEPTH = tl.constexpr(128)  # bytes of a row that a descriptor reads at a time: a whole line


@triton.jit(do_not_specialize=["M", "chunk"])
def multiply_described(
    weight, x, codes, row_scale, x_scale, x_zero, weight_sums, bias, out, partials, counters, M, N, width, chunk,
    OPERAND: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, X_SCALES: tl.constexpr, X_ZEROS: tl.constexpr,
):  # fmt: skip
    """Blocks of outputs in turn, each over the whole of K, or `chunk` consecutive steps of all of them.

    No scale of a group lies between. E4M3 is summed by the tensor cores throughout, as torch's fast products are.

    Args:
        weight, x: descriptors of codes [N, width] and [M, width], read in blocks [BLOCK_N, DEPTH] and [BLOCK_M, DEPTH].
        codes: the weight again, for fetching ahead.
        WHOLE: blocks in turn; `chunk` says nothing.
    """
    SUM: tl.constexpr = tl.int32 if OPERAND == "int8" else tl.float32
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_m = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    steps = tl.cdiv(width, DEPTH)
    if CHAINED:
        gdc_launch_dependents()
        if AHEAD > 0 and not WHOLE:
            block_n, block_m = block_of(program * chunk // steps, tiles_n, tiles_m)
            row = tl.minimum(block_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
            lines = tl.minimum((program * chunk % steps + tl.arange(0, AHEAD)) * DEPTH, width - 1)
            fetch_ahead(codes + row.to(tl.int64)[:, None] * width + lines[None, :])
        gdc_wait()
    if WHOLE:
        for tile in tl.range(program, tiles_n * tiles_m, tl.num_programs(0), flatten=True):
            block_n, block_m = block_of(tile, tiles_n, tiles_m)
            total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
            for step in tl.range(0, steps, num_stages=STAGES):
                words = weight.load([block_n * BLOCK_N, step * DEPTH])
                total = tl.dot(words, x.load([block_m * BLOCK_M, step * DEPTH]).T, total, out_dtype=SUM)
            n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
            finish(
                total.to(tl.float32), n, m, row_scale, x_scale, x_zero, weight_sums, bias, out, M, N, HAS_BIAS,
                X_SCALES, X_ZEROS,
            )  # fmt: skip
    else:
        begin = program * chunk
        end = tl.minimum(begin + chunk, tiles_n * tiles_m * steps)
        for tile in range(begin // steps, tl.cdiv(end, steps)):
            block_n, block_m = block_of(tile, tiles_n, tiles_m)
            total = tl.zeros((BLOCK_N, BLOCK_M), SUM)
            for step in tl.range(
                tl.maximum(begin - tile * steps, 0), tl.minimum(end - tile * steps, steps), num_stages=STAGES
            ):
                words = weight.load([block_n * BLOCK_N, step * DEPTH])
                total = tl.dot(words, x.load([block_m * BLOCK_M, step * DEPTH]).T, total, out_dtype=SUM)
            n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
            share(
                total.to(tl.float32), n, m, tile, program, steps, chunk, row_scale, x_scale, x_zero, weight_sums, bias,
                out, partials, counters, M, N, HAS_BIAS, X_SCALES, X_ZEROS, BLOCK_N, BLOCK_M,
            )  # fmt: skip


@triton.jit
def sum_of_codes(
    x, weight, scale, x_scale, n, m, M, N, width, stride, begin, end, KIND: tl.constexpr, OPERAND: tl.constexpr,
    RUN: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, FOLDS: tl.constexpr,
):  # fmt: skip
    """Sums of one block over the units from `begin` to `end`, float32 [BLOCK_N, BLOCK_M], scales of rows left out."""
    if FOLDS:
        return sum_of_folded(
            x, weight, scale, n, m, M, N, width, stride, begin, end, RUN, BLOCK_N, BLOCK_M, STAGES, PACKED
        )
    SUM: tl.constexpr = tl.int32 if OPERAND == "int8" else tl.float32
    WHOLE_SUMS: tl.constexpr = OPERAND == "int8" and GROUP == 0 and X_GROUP == 0
    row = tl.minimum(n, N - 1)
    token = tl.minimum(m, M - 1)
    words_at = weight + row.to(tl.int64)[:, None] * stride + tl.arange(0, RUN)[None, :]
    x_at = x + token.to(tl.int64)[None, :] * width + tl.arange(0, RUN)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), SUM if WHOLE_SUMS else tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + unit * RUN)
        if KIND != "codes":
            lower, upper = both_runs(words, KIND, OPERAND, PACKED)
        for index in tl.static_range(FIELDS):
            if KIND == "codes":
                operand = words
            elif index == 0:
                operand = lower
            else:
                operand = upper
            if OPERAND == "e4m3" and KIND != "codes":
                operand = operand.to(tl.float8e4nv, bitcast=True)
            first = (unit * FIELDS + index) * RUN
            inputs = tl.load(x_at + first)
            if WHOLE_SUMS:
                total = tl.dot(operand, inputs, total, out_dtype=SUM)
            else:
                product = tl.dot(operand, inputs, out_dtype=SUM).to(tl.float32)
                if GROUP > 0:
                    product *= tl.load(scale + (first // GROUP) * N + row).to(tl.float32)[:, None]
                if X_GROUP > 0:
                    product *= tl.load(x_scale + (first // X_GROUP) * M + token)[None, :]
                total += product
    return total.to(tl.float32)


@triton.jit
def folded_part(
    bytes_at, first_word, second_word, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Operands of 32 features of both runs of a unit, with the scales of their groups, int8 [BLOCK_N, 32] each."""
    words = tl.load(bytes_at + PART * 32)
    first = tl.broadcast_to(first_word[:, None], (BLOCK_N, 32))
    second = tl.broadcast_to(second_word[:, None], (BLOCK_N, 32))
    return e2m1_runs(words, first, second, PART, (PARTS + PART) % 4, PACKED)


@triton.jit
def two_folded_parts(
    bytes_at, first_word, second_word, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The same of 64 features."""
    lower, upper = folded_part(bytes_at, first_word, second_word, PART, PARTS, BLOCK_N, PACKED)
    next_lower, next_upper = folded_part(bytes_at, first_word, second_word, PART + 1, PARTS, BLOCK_N, PACKED)
    return beside(lower, next_lower), beside(upper, next_upper)


@triton.jit
def folded_runs(
    bytes_at, first_word, second_word, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Operands of both runs of a unit, int8 [BLOCK_N, 32 * PARTS] each."""
    if PARTS == 1:
        return folded_part(bytes_at, first_word, second_word, 0, PARTS, BLOCK_N, PACKED)
    elif PARTS == 2:
        return two_folded_parts(bytes_at, first_word, second_word, 0, PARTS, BLOCK_N, PACKED)
    else:
        lower, upper = two_folded_parts(bytes_at, first_word, second_word, 0, PARTS, BLOCK_N, PACKED)
        next_lower, next_upper = two_folded_parts(bytes_at, first_word, second_word, 2, PARTS, BLOCK_N, PACKED)
        return beside(lower, next_lower), beside(upper, next_upper)


@triton.jit
def sum_of_folded(
    x, weight, offsets, n, m, M, N, width, stride, begin, end, RUN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums of one block over the units from `begin` to `end` where operands hold the scales of their groups of 32.

    The tensor cores sum all of it, as torch's fast product of E4M3 does.
    """
    PARTS: tl.constexpr = RUN // 32
    WORDS: tl.constexpr = (2 * PARTS + 3) // 4
    row = tl.minimum(n, N - 1)
    bytes_at = weight + row.to(tl.int64)[:, None] * stride + tl.arange(0, 32)[None, :]
    x_at = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * width + tl.arange(0, RUN)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        first_word = tl.load(offsets + unit * WORDS * N + row)
        second_word = tl.load(offsets + (unit * WORDS + WORDS - 1) * N + row)
        lower, upper = folded_runs(bytes_at + unit * RUN, first_word, second_word, PARTS, BLOCK_N, PACKED)
        total = tl.dot(lower.to(tl.float8e4nv, bitcast=True), tl.load(x_at + unit * 2 * RUN), total)
        total = tl.dot(upper.to(tl.float8e4nv, bitcast=True), tl.load(x_at + (unit * 2 + 1) * RUN), total)
    return total


@triton.jit
def decode_nibbles(
    weight, scale, out, N, stride, units, KIND: tl.constexpr, OPERAND: tl.constexpr, RUN: tl.constexpr,
    FOLDS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`UNITS` units of `ROWS` rows: pairs of 4-bit codes [N, stride] to 8-bit operands, bytes [N, 2 * stride].

    Args:
        FOLDS: operands hold the scales of groups as well, `scale` their offsets, see `ProductLayout.folds`.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    PARTS: tl.constexpr = RUN // 32 if FOLDS else 1
    WORDS: tl.constexpr = (2 * PARTS + 3) // 4
    WIDE: tl.constexpr = RUN // PARTS
    of_units = (row < N)[:, None] & (unit < units)[None, :]
    inside = of_units[:, :, None] & (tl.arange(0, WIDE) < WIDE)[None, None, :]
    for part in tl.static_range(PARTS):
        place = tl.arange(0, WIDE)[None, None, :] + part * WIDE
        at = row[:, None, None] * stride + unit[None, :, None] * RUN + place
        words = tl.load(weight + at, mask=inside, other=0)
        if FOLDS:
            scale_at = scale + unit[None, :] * WORDS * N + row[:, None]
            first = tl.load(scale_at, mask=of_units, other=0)[:, :, None]
            second = tl.load(scale_at + (WORDS - 1) * N, mask=of_units, other=0)[:, :, None]
            lower, upper = e2m1_runs(
                words, tl.broadcast_to(first, words.shape), tl.broadcast_to(second, words.shape), part,
                (PARTS + part) % 4, PACKED,
            )  # fmt: skip
        else:
            lower, upper = both_runs(words, KIND, OPERAND, PACKED)
        to = out + row[:, None, None] * (2 * stride) + unit[None, :, None] * (2 * RUN) + place
        tl.store(to, lower, mask=inside)
        tl.store(to + RUN, upper, mask=inside)
