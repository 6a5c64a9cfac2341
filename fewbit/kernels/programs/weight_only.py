"""y = x @ W.T + bias with W decoded from tiles in registers, see `kernels.linear.weight_tiles` for the layout.

The decoded tile is the left operand of the tensor cores and x the right one, so M is the narrow side and nothing decoded
passes through shared memory: packed words arrive there asynchronously and are read in the order the tensor cores want.
Sums over a group are scaled in float32 after the product. Where K is split, the last program to arrive adds the partial
sums in the order of K, whoever wrote them: the same bits every time.
"""

from __future__ import annotations

import triton
from triton import language as tl

from fewbit.kernels.programs.decode import beside, columns, field, group_value, scale_number


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


# Not specialized by these numbers: every M would be a compilation of its own.
@triton.jit(do_not_specialize=["M", "units", "split"])
def multiply(
    x, tiles, scale_words, zero_words, row_scale, bias, out, partials, counters,
    M, N, K, units, split, padded_rows, sum_factor,
    KIND: tl.constexpr, BITS: tl.constexpr, KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr,
    GROUPS: tl.constexpr, UNITS_PER_GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, SCALE_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, PACKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """One block of outputs [BLOCK_N, BLOCK_M], transposed, over one part of K.

    Args:
        sum_factor: what E8M0 scales of sums are too large by, else 1.0, which the compiler must not know.
        GROUPS: groups in a unit; 0 where no scale is applied before the last sum.
        UNITS_PER_GROUP: units in a group where a group is at least as long as a unit.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    FIELDS: tl.constexpr = 16 // BITS
    UNIT: tl.constexpr = FIELDS * KK
    DOTS: tl.constexpr = GROUPS if GROUPS > 1 and not SCALED else 1
    PER: tl.constexpr = FIELDS // DOTS
    DEPTH: tl.constexpr = UNIT // DOTS
    SCALES_A_WORD: tl.constexpr = 32 // SCALE_BITS
    SCALE_WORDS: tl.constexpr = (GROUPS + SCALES_A_WORD - 1) // SCALES_A_WORD
    GROUP_SIZE: tl.constexpr = UNIT // GROUPS if GROUPS > 0 else UNIT
    ZERO_WORDS: tl.constexpr = (DOTS + 3) // 4
    tiles_m = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    length = tl.cdiv(units, split)
    begin = part * length
    end = tl.minimum(begin + length, units)
    n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    depth = tl.arange(0, DEPTH)
    words_at = tiles + (n // 64).to(tl.int64)[:, None] * (units * 64 * KK) + (n % 64)[:, None] * KK
    words_at += tl.arange(0, KK)[None, :]
    x_at = x + m.to(tl.int64)[None, :] * K + depth[:, None]
    inside_m = (m < M)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + unit * (64 * KK))
        first_word = n
        second_word = n
        if SCALED:
            first_word = tl.load(scale_words + unit * SCALE_WORDS * padded_rows + n)
            second_word = first_word
            if SCALE_WORDS == 2:
                second_word = tl.load(scale_words + (unit * 2 + 1) * padded_rows + n)
        for dot in tl.static_range(DOTS):
            scale_bits = n
            zero_bits = n
            if GROUPS > 0 and not SCALED:
                first = (unit // UNITS_PER_GROUP) * SCALE_WORDS + dot // SCALES_A_WORD
                loaded = tl.load(scale_words + first * padded_rows + n)
                scale_bits = group_value(loaded, dot % SCALES_A_WORD, SCALE_BITS)
            if HAS_ZERO:
                first = (unit // UNITS_PER_GROUP) * ZERO_WORDS + dot // 4
                zero_bits = group_value(tl.load(zero_words + first * padded_rows + n), dot % 4, 8)
            if SCALED:
                weight = scaled_columns(
                    words, first_word, second_word, KK, GROUP_SIZE, SCALE_KIND, KIND, BITS, BLOCK_N, DTYPE, PACKED
                )
            else:
                operand = added(zero_bits, BASE, HAS_ZERO, KK, BLOCK_N, DTYPE)
                weight = columns(words, operand, dot * PER, PER, KIND, BITS, MAGIC, PACKED)
            inside = inside_m
            if not EVEN_K:
                inside = inside_m & (unit * UNIT + dot * DEPTH + depth < K)[:, None]
            inputs = tl.load(x_at + unit * UNIT + dot * DEPTH, mask=inside, other=0.0)
            if EXACT_DOT:  # Triton's interpreter multiplies bf16 wrongly
                weight = weight.to(tl.float32)
                inputs = inputs.to(tl.float32)
            product = tl.dot(weight, inputs, out_dtype=tl.float32)
            if GROUPS > 0 and not SCALED:
                scale = scale_number(scale_bits, SCALE_KIND)
                if SCALE_KIND == "e8m0":
                    scale *= sum_factor
                total += product * scale[:, None]
            else:
                # Not summed by the tensor cores: that would make every product wait for the one before.
                total += product * sum_factor
    inside = inside_m & (n < N)[:, None]
    place = m.to(tl.int64)[None, :] * N + n[:, None]
    if split > 1:
        size = M.to(tl.int64) * N
        tl.store(partials + part * size + place, total, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == split - 1:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for other in range(split):
                total += tl.load(partials + other * size + place, mask=inside, other=0.0, cache_modifier=".cg")
            finish(total, n, place, inside, row_scale, bias, out, N, HAS_BIAS)
            tl.store(counters + tile, 0)
    else:
        finish(total, n, place, inside, row_scale, bias, out, N, HAS_BIAS)


@triton.jit
def finish(total, n, place, inside, row_scale, bias, out, N, HAS_BIAS: tl.constexpr):
    """Scales rows, adds the bias, rounds once and stores."""
    total = total * tl.load(row_scale + n, mask=n < N, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["units"])
def decode(
    tiles, scale_words, zero_words, row_scale, out, N, K, units, padded_rows, sum_factor,
    KIND: tl.constexpr, BITS: tl.constexpr, KK: tl.constexpr, BASE: tl.constexpr, MAGIC: tl.constexpr,
    GROUPS: tl.constexpr, UNITS_PER_GROUP: tl.constexpr, SCALE_KIND: tl.constexpr, SCALE_BITS: tl.constexpr,
    HAS_ZERO: tl.constexpr, SCALED: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One tile of the weight [N, K] in full: scaled in float32, rounded once."""
    FIELDS: tl.constexpr = 16 // BITS
    UNIT: tl.constexpr = FIELDS * KK
    DOTS: tl.constexpr = GROUPS if GROUPS > 1 and not SCALED else 1
    PER: tl.constexpr = FIELDS // DOTS
    SCALES_A_WORD: tl.constexpr = 32 // SCALE_BITS
    SCALE_WORDS: tl.constexpr = (GROUPS + SCALES_A_WORD - 1) // SCALES_A_WORD
    GROUP_SIZE: tl.constexpr = UNIT // GROUPS if GROUPS > 0 else UNIT
    ZERO_WORDS: tl.constexpr = (DOTS + 3) // 4
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
            first = (unit // UNITS_PER_GROUP) * SCALE_WORDS + dot // SCALES_A_WORD
            bits = group_value(tl.load(scale_words + first * padded_rows + n), dot % SCALES_A_WORD, SCALE_BITS)
            scale = scale_number(bits, SCALE_KIND) * over_rows
            if SCALE_KIND == "e8m0":
                scale = scale_number(bits, SCALE_KIND) * sum_factor * over_rows
        if HAS_ZERO:
            first = (unit // UNITS_PER_GROUP) * ZERO_WORDS + dot // 4
            zero_bits = group_value(tl.load(zero_words + first * padded_rows + n), dot % 4, 8)
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
            tl.store(out + place, (numbers.to(tl.float32) * scale[:, None]).to(DTYPE), mask=inside)
