// Products of one or two rows of x with codes as they are stored, by tensor cores for integers of 8 bits.
//
// 128 input features of a row become integers of 22 bits and a sign, whose unit is a power of two that the largest of them
// decides: what is lost is of the order of what float32 loses in adding them up. Three signed digits of 8 bits each are three
// columns of the right operand, so that codes take three instructions for eight weights, and sums of a group are exact.
//
// Compile-time: TOKENS (rows of x that there is room for).

static_assert(TOKENS <= 2, "a row of x takes four of eight columns");
constexpr int DIGITS = 3;
constexpr int DIGIT_BYTES = DIGITS * DEPTH;           // of a row and 128 input features: [digit, thread of four, word]
constexpr int FACTORS = 1 + 2 * GROUPS;               // the unit, and sums of a group's upper two digits and of its lowest
constexpr int FEATURE_BYTES = DIGIT_BYTES + (FACTORS * 4 + 15) / 16 * 16;
constexpr float CODE_BASE = 8;                        // of a code of zero where there are no zero points
constexpr float ZERO_BASE = HALF ? 1024.f : 128.f;    // zero points are stored for codes plus MAGIC
constexpr int UNIT_BITS = 21;
struct Sums {
    float of[2];
};

__device__ __forceinline__ uint2 load_rows8(const u16* from) {
    uint2 found;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(found.x), "=r"(found.y) : "l"(from) : "memory");
    return found;
}

__device__ __forceinline__ int rounded(float number) {
    int found;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(found) : "f"(number));
    return found;
}

// Four input features of each thread -> digits, in the order of the left operand's input features.
__device__ __forceinline__ void split_into_digits(uint2 four, u32 to, int lane) {
    const float x[4] = {widen((u16)four.x), widen((u16)(four.x >> 16)), widen((u16)four.y), widen((u16)(four.y >> 16))};
    const float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
    const u32 bits = (x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3]) ? 0x7F800000 : __float_as_uint(most);
    const u32 exponent = max(__reduce_max_sync(0xFFFFFFFF, bits) >> 23, UNIT_BITS + 1);
    const float up = __uint_as_float((127 + 127 + UNIT_BITS - exponent) << 23);
    u32 digits[4];
    int upper = 0, lowest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int number = rounded(x[i] * up), above = (number + 128) >> 8;
        digits[i] = (number + 0x8080) ^ 0x8080;
        upper += above, lowest += number - (above << 8);
    }
    const u32 low01 = __byte_perm(digits[0], digits[1], 0x5140), low23 = __byte_perm(digits[2], digits[3], 0x5140);
    const u32 high01 = __byte_perm(digits[0], digits[1], 0x0062), high23 = __byte_perm(digits[2], digits[3], 0x0062);
    const u32 words[DIGITS] = {__byte_perm(high01, high23, 0x5410), __byte_perm(low01, low23, 0x7632),
                               __byte_perm(low01, low23, 0x5410)};
    const bool later = lane & 2;  // input features 8 to 15 of 16
    const u32 at = to + (lane % 2 * 2 + later) * 32 + lane / 4 * 4;
#pragma unroll
    for (int d = 0; d < DIGITS; d++)
        store_shared4(at + d * DEPTH, __byte_perm(words[d], __shfl_xor_sync(0xFFFFFFFF, words[d], 2), later ? 0x3726 : 0x5140));
#pragma unroll
    for (int apart = 1; apart < GROUP / 4; apart *= 2) {
        upper += __shfl_xor_sync(0xFFFFFFFF, upper, apart);
        lowest += __shfl_xor_sync(0xFFFFFFFF, lowest, apart);
    }
    const u32 factors = to + DIGIT_BYTES;
    if (lane == 0)  // of a number that is none nothing is right
        store_shared4(factors, exponent == 255 ? 0x7FC00000 : (exponent - UNIT_BITS) << 23);
    if (lane % (GROUP / 4) == 0) {
        store_shared4(factors + 4 + lane / (GROUP / 4) * 8, __float_as_uint((float)upper));
        store_shared4(factors + 8 + lane / (GROUP / 4) * 8, __float_as_uint((float)lowest));
    }
}

// The block's part of x, which all threads call; `meanwhile` is done once it has been asked for.
template <typename Action>
__device__ __forceinline__ void prepare_features(const Problem& p, const Block& block, Action meanwhile) {
    constexpr int LOADS = 8;  // in flight
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, depths = block.end - block.first;
    wait_for_previous();
#pragma unroll 1
    for (int i = warp; i < depths * p.tokens || i == warp; i += LOADS * WARPS) {
        uint2 found[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int pair = i + j * WARPS, feature = (block.first + pair / p.tokens) * DEPTH + lane * 4;
            found[j] = {0, 0};
            if (pair < depths * p.tokens && feature < p.columns)
                found[j] = load_rows8(p.x + (u64)(pair % p.tokens) * p.columns + feature);
        }
        if (i == warp) meanwhile();
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int pair = i + j * WARPS;
            if (pair < depths * p.tokens)
                split_into_digits(found[j],
                                  block.features + (pair / p.tokens * TOKENS + pair % p.tokens) * FEATURE_BYTES, lane);
        }
    }
    __syncthreads();
}

// 128 input features of x. Of four threads two and two share a row of x: upper digits, and the lowest.
struct Features {
    u32 columns[8];
    float unit, sums[GROUPS];
    int times;

    __device__ __forceinline__ Features(const Block& block, int, int depth, int lane) {
        const u32 at = block.features + (depth - block.first) * (TOKENS * FEATURE_BYTES);
        const int column = lane / 4, digit = column % 4 < 2 ? column % 4 : 2;
        const bool lowest = lane & 1;
        times = lowest ? 0 : 256;
        const u32 digits = at + min(column / 4, TOKENS - 1) * FEATURE_BYTES + digit * DEPTH + lane % 4 * 32;
        const uint4 low = load_shared16(digits), high = load_shared16(digits + 16);
        columns[0] = low.x, columns[1] = low.y, columns[2] = low.z, columns[3] = low.w;
        columns[4] = high.x, columns[5] = high.y, columns[6] = high.z, columns[7] = high.w;
        const u32 factors = at + min(lane % 4 / 2, TOKENS - 1) * FEATURE_BYTES + DIGIT_BYTES;
        unit = __uint_as_float(load_shared4(factors)) * (lowest ? 1.f : 256.f);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) sums[g] = __uint_as_float(load_shared4(factors + 4 + g * 8 + lowest * 4));
    }
};

__device__ __forceinline__ void multiply_digits(int (&sums)[4], const u32 (&fragment)[4], u32 low, u32 high) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ void add_products(Sums& sums, const Share& share, const Features& x) {
    constexpr u32 NIBBLES = 0x0F0F0F0F;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        int found[4] = {};
#pragma unroll
        for (int k = g * 8 / GROUPS; k < (g + 1) * 8 / GROUPS; k += 2) {
            const u32 low = share.codes[k], high = share.codes[k + 1];
            const u32 fragment[4] = {low & NIBBLES, low >> 4 & NIBBLES, high & NIBBLES, high >> 4 & NIBBLES};
            multiply_digits(found, fragment, x.columns[k], x.columns[k + 1]);
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
            const u16 scale = share.scales[g] >> 16 * row, zero = share.zeros[g] >> 16 * row;
            const float base = HAS_ZERO ? widen(zero) - ZERO_BASE : CODE_BASE;
            const float of_codes = (float)(found[2 * row] * x.times + found[2 * row + 1]);
            sums.of[row] += widen(scale) * ((of_codes - base * x.sums[g]) * x.unit);
        }
    }
}

// In the order of a product's sums by tensor cores: the first thread of four gets those of two rows of x for each of two output
// features.
__device__ __forceinline__ void leave_sums(u32 to, const Sums& sums, int lane) {
    float left[4];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        left[2 * row] = sums.of[row] + __shfl_xor_sync(0xFFFFFFFF, sums.of[row], 1);
        left[2 * row + 1] = __shfl_xor_sync(0xFFFFFFFF, left[2 * row], 2);
    }
    store_shared16(to + lane * 16, left[0], left[1], left[2], left[3]);
}
