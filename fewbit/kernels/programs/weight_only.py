"""y = x @ W.T + bias with W decoded from tiles in registers, see `kernels.linear.weight_tiles` for the layout.

The decoded tile is the left operand of the tensor cores and x the right one, so M is the narrow side, and nothing
decoded passes through shared memory: packed words arrive there asynchronously and are read in the order that the tensor
cores want.
Sums over a group are scaled in float32 after the product.

The work is cut into equal chunks, whatever the number of blocks: a program may end one block and begin the next. Where
several programs share a block, the last to arrive adds their partial sums in the order of K: the same bits every time.
"""

from __future__ import annotations

import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fewbit.kernels.programs.decode import beside, columns, field, group_value, multiplied, scale_number
from fewbit.kernels.programs.fetch import fetch_ahead
from fewbit.kernels.programs.outputs import finish, share


@triton.jit
def added(
    zero_bits, BASE: tl.constexpr, HAS_ZERO: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr
):
    """What decoding adds to integers and multiplies floats by, [ROWS, RUN]: one value a row, or one for all."""
    if HAS_ZERO:
        zero = (zero_bits << 24) >> 24  # int8
        return tl.broadcast_to((BASE - zero.to(tl.float32)).to(DTYPE)[:, None], (ROWS, RUN))
    else:
        return tl.full((ROWS, RUN), BASE, tl.float32).to(DTYPE)


@triton.jit
def of_group(
    words, n, padded_rows, first_group, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """The bits that rows `n` have for one group of `GROUPS` whose words start at the same place, int32 [ROWS]."""
    A_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = (GROUPS + A_WORD - 1) // A_WORD
    word = tl.load(words + (first_group * WORDS + GROUP // A_WORD) * padded_rows + n)
    return group_value(word, GROUP % A_WORD, BITS)


@triton.jit
def factor(
    word, GROUP: tl.constexpr, WIDTH: tl.constexpr, SCALE_KIND: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The scales of a group as factors for decoding, [ROWS, WIDTH]; see `weight_tiles` for their code."""
    code = group_value(word, GROUP % 4, 8)
    if SCALE_KIND == "e8m0":
        bits = code << 7
    elif DTYPE == tl.bfloat16:
        bits = (code << 4) + (237 << 7)
    else:
        bits = (code << 7) + (13 << 10)
    return tl.broadcast_to(bits.to(tl.int16).to(DTYPE, bitcast=True)[:, None], (ROWS, WIDTH))


@triton.jit
def scaled_field(
    words, word, INDEX: tl.constexpr, RUN: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALE_KIND: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """A field with its scales multiplied in, [ROWS, RUN]; `word` holds the scales of its one or two groups."""
    if RUN <= GROUP_SIZE:
        multipliers = factor(word, INDEX * RUN // GROUP_SIZE, RUN, SCALE_KIND, ROWS, DTYPE)
    else:
        multipliers = beside(
            factor(word, 2 * INDEX, GROUP_SIZE, SCALE_KIND, ROWS, DTYPE),
            factor(word, 2 * INDEX + 1, GROUP_SIZE, SCALE_KIND, ROWS, DTYPE),
        )
    return field(words, multipliers, INDEX, KIND, BITS, 0, PACKED)


@triton.jit
def scaled_columns(
    words, first, second, RUN: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALE_KIND: tl.constexpr, KIND: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """All fields of a unit with their scales multiplied in; two words of four scales where there are eight groups."""
    lower = beside(
        scaled_field(words, first, 0, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED),
        scaled_field(words, first, 1, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED),
    )
    if BITS == 8:
        return lower
    else:
        upper = beside(
            scaled_field(words, second, 2, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED),
            scaled_field(words, second, 3, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED),
        )
        return beside(lower, upper)


@triton.jit
def fetch_units(
    tiles, first_row, unit, units, padded_rows, KK: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Brings `AHEAD` units of `BLOCK_N` rows into the second-level cache; rows of a tile lie together."""
    HIGH: tl.constexpr = BLOCK_N if BLOCK_N < 64 else 64
    last = padded_rows.to(tl.int64) * units * KK - 1
    for part in tl.static_range(BLOCK_N // HIGH):
        row = first_row + part * HIGH
        start = (row // 64).to(tl.int64) * (units * 64 * KK) + unit * (64 * KK) + row % 64 * KK
        fetch_ahead(tiles + tl.minimum(start + tl.arange(0, AHEAD * 64 * KK // 64) * 64, last))


@triton.jit
def scaled(
    words, first, second, DOT: tl.constexpr, RUN: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALE_KIND: tl.constexpr,
    KIND: tl.constexpr, BITS: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Field `DOT` of a unit with its scales multiplied in where `ONE` is wanted, else all of them."""
    if ONE:
        if DOT > 1:
            return scaled_field(words, second, DOT, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED)
        else:
            return scaled_field(words, first, DOT, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED)
    else:
        return scaled_columns(words, first, second, RUN, GROUP_SIZE, SCALE_KIND, KIND, BITS, ROWS, DTYPE, PACKED)


@triton.jit
def operand_of(
    words, first_word, second_word, scale_bits, zero_bits, sum_factor, DOT: tl.constexpr, PER: tl.constexpr,
    KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_KIND: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr, SCALED: tl.constexpr,
    FOLDS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The left side of the `DOT`-th product of a unit: `PER` fields of its words, times scales where these fold."""
    if SCALED:
        return scaled(
            words, first_word, second_word, DOT, KK, GROUP_SIZE, SCALE_KIND, KIND, BITS, FOLDS, ROWS, DTYPE, PACKED
        )
    else:
        operand = added(zero_bits, BASE, HAS_ZERO, KK, ROWS, DTYPE)
        numbers = columns(words, operand, DOT * PER, PER, KIND, BITS, MAGIC, PACKED)
        if FOLDS and GROUPS > 0:
            factors = scale_number(scale_bits, SCALE_KIND, sum_factor).to(DTYPE)
            numbers = multiplied(numbers, tl.broadcast_to(factors[:, None], (ROWS, KK)), PACKED)
        return numbers


# Not specialized by these numbers: every M would be a compilation of its own.
@triton.jit(do_not_specialize=["M", "units", "chunk"])
def multiply(
    x, tiles, scale_words, zero_words, row_scale, x_scale, bias, out, partials, counters,
    M, N, K, units, chunk, padded_rows, sum_factor,
    KIND: tl.constexpr, BITS: tl.constexpr, KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr,
    GROUPS: tl.constexpr, UNITS_PER_GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, SCALE_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, EXACT_DOT: tl.constexpr,
    CHAINED: tl.constexpr, WHOLE: tl.constexpr, X_SCALES: tl.constexpr, FOLDS: tl.constexpr, AHEAD: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`chunk` consecutive steps of the work, which is every unit of K of every block of outputs [BLOCK_N, BLOCK_M].

    Args:
        sum_factor: what E8M0 scales of sums are too large by, else 1.0, which the compiler must not know.
        GROUPS: groups in a unit; 0 where no scale is applied before the last sum.
        UNITS_PER_GROUP: units in a group where a group is at least as long as a unit.
        X_SCALES: `tokens` or `one` where x counts in units of scales, else `none`.
        WHOLE: a chunk is the whole of one block.
        FOLDS: scales of groups multiply decoded numbers, rounded once more to x's dtype; else they multiply sums.
        CHAINED: the launch may begin before the kernel before it ends, and the next one before this ends.
        DESCRIBED: x is a descriptor, read in blocks as wide as the products are deep.
        AHEAD: units of its first block that a program fetches meanwhile.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    program = tl.program_id(0)
    begin = program * chunk
    if CHAINED:
        if AHEAD > 0:
            gdc_launch_dependents()
            fetch_units(
                tiles, begin // units // tiles_m * BLOCK_N, begin % units, units, padded_rows, KK, BLOCK_N, AHEAD
            )
        gdc_wait()
        if AHEAD == 0:
            gdc_launch_dependents()
    end = tl.minimum(begin + chunk, tl.cdiv(padded_rows, BLOCK_N) * tiles_m * units)
    if WHOLE:
        n = (program // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
        m = (program % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
        total = sum_of_units(
            x, tiles, scale_words, zero_words, n, m, program % tiles_m * BLOCK_M, M, K, units, padded_rows, sum_factor,
            0, units,
            KIND, BITS, KK, BASE, MAGIC, GROUPS, UNITS_PER_GROUP, SCALE_KIND, SCALE_BITS, HAS_ZERO, SCALED, EVEN_K,
            FOLDS, DESCRIBED, out.dtype.element_ty, BLOCK_N, BLOCK_M, STAGES, PACKED, EXACT_DOT,
        )  # fmt: skip
        finish(total, n, m, row_scale, x_scale, x_scale, row_scale, bias, out, M, N, HAS_BIAS, X_SCALES, "none")
    else:
        for tile in range(begin // units, tl.cdiv(end, units)):
            n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
            m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
            total = sum_of_units(
                x, tiles, scale_words, zero_words, n, m, tile % tiles_m * BLOCK_M, M, K, units, padded_rows, sum_factor,
                tl.maximum(begin - tile * units, 0), tl.minimum(end - tile * units, units),
                KIND, BITS, KK, BASE, MAGIC, GROUPS, UNITS_PER_GROUP, SCALE_KIND, SCALE_BITS, HAS_ZERO, SCALED,
                EVEN_K, FOLDS, DESCRIBED, out.dtype.element_ty, BLOCK_N, BLOCK_M, STAGES, PACKED, EXACT_DOT,
            )  # fmt: skip
            share(
                total, n, m, tile, program, units, chunk, row_scale, x_scale, x_scale, row_scale, bias, out, partials,
                counters, M, N, HAS_BIAS, X_SCALES, "none", BLOCK_N, BLOCK_M,
            )  # fmt: skip


@triton.jit
def inputs_of(x, first_m, m, first_k, M, K, DEPTH: tl.constexpr, EVEN_K: tl.constexpr, DESCRIBED: tl.constexpr):
    """The right side of a product, x [M, K] turned: `DEPTH` input features from `first_k` on of the rows m."""
    if DESCRIBED:
        return x.load([first_m, first_k]).T
    else:
        k = first_k + tl.arange(0, DEPTH)[:, None]
        inside = (m < M)[None, :]
        if not EVEN_K:
            inside &= k < K
        return tl.load(x + m.to(tl.int64)[None, :] * K + k, mask=inside, other=0.0)


@triton.jit
def sum_of_units(
    x, tiles, scale_words, zero_words, n, m, first_m, M, K, units, padded_rows, sum_factor, begin, end,
    KIND: tl.constexpr, BITS: tl.constexpr, KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr,
    GROUPS: tl.constexpr, UNITS_PER_GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, SCALE_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALED: tl.constexpr, EVEN_K: tl.constexpr, FOLDS: tl.constexpr,
    DESCRIBED: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Sums of one block over the units from `begin` to `end`, float32 [BLOCK_N, BLOCK_M], row scales left out."""
    FIELDS: tl.constexpr = 16 // BITS
    UNIT: tl.constexpr = FIELDS * KK
    OF_SUMS: tl.constexpr = GROUPS > 0 and not SCALED and not FOLDS
    DOTS: tl.constexpr = FIELDS if FOLDS else GROUPS if OF_SUMS else 1
    PER: tl.constexpr = FIELDS // DOTS
    DEPTH: tl.constexpr = UNIT // DOTS
    SCALE_WORDS: tl.constexpr = (GROUPS + 3) // 4
    GROUP_SIZE: tl.constexpr = UNIT // GROUPS if GROUPS > 0 else UNIT
    words_at = tiles + (n // 64).to(tl.int64)[:, None] * (units * 64 * KK) + (n % 64)[:, None] * KK
    words_at += tl.arange(0, KK)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + unit * (64 * KK))
        first_word = n
        second_word = n
        if SCALED:
            first_word = tl.load(scale_words + unit * SCALE_WORDS * padded_rows + n)
            second_word = tl.load(scale_words + (unit * SCALE_WORDS + SCALE_WORDS - 1) * padded_rows + n)
        for dot in tl.static_range(DOTS):
            scale_bits = n
            zero_bits = n
            if GROUPS > 0 and not SCALED:
                scale_bits = of_group(
                    scale_words, n, padded_rows, unit // UNITS_PER_GROUP, dot * DEPTH // GROUP_SIZE, GROUPS, SCALE_BITS
                )
            if HAS_ZERO:
                zero_bits = of_group(
                    zero_words, n, padded_rows, unit // UNITS_PER_GROUP, dot * DEPTH // GROUP_SIZE, GROUPS, 8
                )
            weight = operand_of(
                words, first_word, second_word, scale_bits, zero_bits, sum_factor, dot, PER, KK, BASE, MAGIC, GROUPS,
                GROUP_SIZE, SCALE_KIND, KIND, BITS, HAS_ZERO, SCALED, FOLDS, BLOCK_N, DTYPE, PACKED,
            )  # fmt: skip
            inputs = inputs_of(x, first_m, m, unit * UNIT + dot * DEPTH, M, K, DEPTH, EVEN_K, DESCRIBED)
            if EXACT_DOT:  # Triton's interpreter multiplies bf16 wrongly
                weight = weight.to(tl.float32)
                inputs = inputs.to(tl.float32)
            if FOLDS:
                total = tl.dot(weight, inputs, total)
            elif OF_SUMS:
                total += tl.dot(weight, inputs) * scale_number(scale_bits, SCALE_KIND, sum_factor)[:, None]
            else:
                # Not summed by the tensor cores: that would make every product wait for the one before.
                total += tl.dot(weight, inputs) * sum_factor
    return total


@triton.jit(do_not_specialize=["units"])
def decode(
    tiles, scale_words, zero_words, row_scale, out, group_scale, N, K, units, padded_rows, sum_factor,
    KIND: tl.constexpr, BITS: tl.constexpr, KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr,
    GROUPS: tl.constexpr, UNITS_PER_GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, SCALE_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One tile of the weight [N, K] in full: scaled in float32, rounded once to the dtype of `out`.

    Args:
        DTYPE: what fields are decoded to, bf16 or f16.
        CODES: scales of groups that decoding does not multiply in are stored apart, float32 [groups, N].
    """
    FIELDS: tl.constexpr = 16 // BITS
    UNIT: tl.constexpr = FIELDS * KK
    DOTS: tl.constexpr = GROUPS if GROUPS > 1 and not SCALED else 1
    PER: tl.constexpr = FIELDS // DOTS
    SCALE_WORDS: tl.constexpr = (GROUPS + 3) // 4
    GROUP_SIZE: tl.constexpr = UNIT // GROUPS if GROUPS > 0 else UNIT
    unit = tl.program_id(1)
    row = tl.arange(0, 64)
    n = tl.program_id(0) * 64 + row
    first_word = (tl.program_id(0).to(tl.int64) * units + unit) * 64 * KK
    words = tl.load(tiles + first_word + row[:, None] * KK + tl.arange(0, KK)[None, :])
    over_rows = tl.load(row_scale + n)
    for dot in tl.static_range(DOTS):
        zero_bits = n
        scale = over_rows
        if GROUPS > 0 and not SCALED:
            bits = of_group(scale_words, n, padded_rows, unit // UNITS_PER_GROUP, dot, DOTS, SCALE_BITS)
            if CODES:
                place = (unit // UNITS_PER_GROUP * DOTS + dot) * N + n
                tl.store(group_scale + place, scale_number(bits, SCALE_KIND, sum_factor), mask=n < N)
            else:
                scale = scale_number(bits, SCALE_KIND, sum_factor) * over_rows
        if HAS_ZERO:
            zero_bits = of_group(zero_words, n, padded_rows, unit // UNITS_PER_GROUP, dot, DOTS, 8)
        operand = added(zero_bits, BASE, HAS_ZERO, KK, 64, DTYPE)
        for index in tl.static_range(PER):
            if SCALED:
                first = unit * SCALE_WORDS + index * SCALE_WORDS // FIELDS
                word = tl.load(scale_words + first * padded_rows + n)
                numbers = scaled_field(words, word, index, KK, GROUP_SIZE, SCALE_KIND, KIND, BITS, 64, DTYPE, PACKED)
            else:
                numbers = field(words, operand, dot * PER + index, KIND, BITS, MAGIC, PACKED)
            k = unit * UNIT + (dot * PER + index) * KK + tl.arange(0, KK)
            place = n.to(tl.int64)[:, None] * K + k[None, :]
            inside = (n < N)[:, None] & (k < K)[None, :]
            tl.store(out + place, (numbers.to(tl.float32) * scale[:, None]).to(out.dtype.element_ty), mask=inside)
