// Products of up to 8 rows of x with codes that become floats in registers.

constexpr int NO_ROW_BYTES = 2 * DEPTH;  // what is read of rows that x does not have
constexpr u32 ONES = HALF ? 0x3C003C00 : 0x3F803F80;

// A code in a float: plus 128 in bf16; in fp16, whose sums would be less exact, plus 16.
constexpr float LESS_THAN_MAGIC = HALF ? 1024 - 16 : 0;  // zero points are stored for codes plus MAGIC
constexpr float CODE_BASE = HALF ? 16 + 8 : 128 + 8;     // of a code of zero where there are no zero points

struct Sums {
    float of[4];
};

__device__ __forceinline__ void multiply_eight(float (&sums)[4], const u32 (&fragment)[4], const u32 (&columns)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." FLOAT "." FLOAT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "r"(columns[0]), "r"(columns[1]));
}

__device__ __forceinline__ void unpack(u32 (&fragment)[4], u32 codes) {
#if HALF
    const u32 moved[4] = {codes << 6, codes << 2, codes >> 2, codes >> 6};
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(fragment[i]) : "r"(moved[i]), "r"(0x03C003C0), "r"(0x4C004C00));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) fragment[i] = to_floats(codes >> 4 * i);
#endif
}

// Rows of a block's part of x lie one after another, each in banks of its own, behind a barrier and a row of zeros.
__device__ __forceinline__ u32 row_stride(const Block& block) { return (block.end - block.first) * 2 * DEPTH + 16; }
__device__ __forceinline__ u32 row_at(const Block& block, int row, int tokens) {
    return block.features + 16 + (row < tokens ? NO_ROW_BYTES + row * row_stride(block) : 0);
}

// The block's part of x, which all threads call, zeros where x has no features; `meanwhile` is done once it has been asked for.
template <typename Action>
__device__ __forceinline__ void prepare_features(const Problem& p, const Block& block, Action meanwhile) {
    const int thread = threadIdx.x, features = (block.end - block.first) * DEPTH;
    const int bytes = 2 * max(0, min(features, p.columns - block.first * DEPTH)), padding = (2 * features - bytes) / 16;
    for (int i = thread; i < NO_ROW_BYTES / 16; i += THREADS) store_shared16(block.features + 16 + 16 * i, 0, 0, 0, 0);
    for (int i = thread; i < p.tokens * padding; i += THREADS)
        store_shared16(row_at(block, i / padding, p.tokens) + bytes + i % padding * 16, 0, 0, 0, 0);
    if (thread == 0) {
        barrier_init(block.features, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (thread < 32) {
        wait_for_previous();
        if (thread == 0) barrier_expect(block.features, p.tokens * bytes);
        __syncwarp();
        if (thread < p.tokens && bytes > 0)
            copy_bytes(row_at(block, thread, p.tokens), p.x + (u64)thread * p.columns + block.first * DEPTH, bytes,
                       block.features, policy_evict_first());
    }
    meanwhile();
    barrier_wait(block.features, 0);
}

// 128 input features of x as the tensor cores take them, and their sums over each group.
struct Features {
    u32 columns[8][2];
    float sums[GROUPS][4];

    __device__ __forceinline__ Features(const Block& block, int tokens, int depth, int lane) {
        const int row = lane % 8;
        const u32 at = row_at(block, row, tokens) + (row < tokens ? (depth - block.first) * 2 * DEPTH : 0) + lane / 8 * 16;
#pragma unroll
        for (int k = 0; k < 8; k += 2) {
            u32 found[4];
            load_matrices(found, at + k * 32);
            columns[k][0] = found[0], columns[k][1] = found[1];
            columns[k + 1][0] = found[2], columns[k + 1][1] = found[3];
        }
        const u32 ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            sums[g][0] = sums[g][1] = sums[g][2] = sums[g][3] = 0.f;
#pragma unroll
            for (int k = g * 8 / GROUPS; k < (g + 1) * 8 / GROUPS; k++) multiply_eight(sums[g], ones, columns[k]);
        }
    }
};

// Products are summed up in two chains at once; sums of a group are scaled, so that nothing is rounded before the result.
__device__ __forceinline__ void add_products(Sums& sums, const Share& share, const Features& x) {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float found[2][4] = {};
#pragma unroll
        for (int k = g * 8 / GROUPS; k < (g + 1) * 8 / GROUPS; k++) {
            u32 fragment[4];
            unpack(fragment, share.codes[k]);
            multiply_eight(found[k % 2], fragment, x.columns[k]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u16 scale = share.scales[g] >> j / 2 * 16, zero = share.zeros[g] >> j / 2 * 16;
            const float base = HAS_ZERO ? widen(zero) - LESS_THAN_MAGIC : CODE_BASE;
            sums.of[j] += widen(scale) * (found[0][j] + found[1][j] - base * x.sums[g][j]);
        }
    }
}

__device__ __forceinline__ void leave_sums(u32 to, const Sums& sums, int lane) {
    store_shared16(to + lane * 16, sums.of[0], sums.of[1], sums.of[2], sums.of[3]);
}
