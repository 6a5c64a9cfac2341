// Sums of decoded weights times tokens that stay in the tensor cores over all of K.
//
// Compile-time: STEP (products, of 32 bytes of input features each, that are decoded at once), AHEAD (see
// `add_stages_of_many`).

constexpr bool FEW = OPERAND_BYTES == 2 && TOKENS <= 16;
constexpr int STEPS = PRODUCTS / STEP;
static_assert(STEPS % 2 == 0, "fragments are decoded while others are multiplied");

// The fragment of product k of a stage.
__device__ __forceinline__ void decode_step(u32 (&fragment)[4], const Share& share, int t, int k) {
    const int group = k * (DEPTH / PRODUCTS) / GROUP, word = group * SCALE_WIDTH / 2;
    decode(fragment, &share.codes[t][k * PRODUCT_WORDS], share.scales[t][word], group, share.zeros[t][word]);
}

// sums [16, 8] += fragment [16, 16] @ columns [16, 8].
__device__ __forceinline__ void multiply_eight(float* sums, const u32 (&fragment)[4], const u32* columns) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." FLOAT "." FLOAT ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "r"(columns[0]), "r"(columns[1]));
}

// Sums over stages by `wgmma`: while it runs, the next codes are decoded. With AHEAD the first stage's share is loaded.
__device__ __forceinline__ void add_stages_of_many(const Reader& reader, float (&sums)[TILES][SUMS], Share& share,
                                                   Turn& turn, int count, bool more) {
    u32 fragment[2][STEP][TILES][4];
    u32 previous = 0;
    for (int i = 0; i < count; i++) {
        Share next;
        const u32 current = turn.stage;
        if (!AHEAD) {
            reader.wait(turn);
            reader.load(share, current);
        }
        turn.next();
        const u64 x = describe_rows(reader.stages + current * STAGE_BYTES);
#pragma unroll
        for (int q = 0; q < STEPS; q++) {
            if (AHEAD && q == STEPS - 1 && (more || i + 1 < count)) {
                reader.wait(turn);
                reader.load(next, turn.stage);
            }
#pragma unroll
            for (int s = 0; s < STEP; s++)
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    decode_step(fragment[q & 1][s][t], share, t, q * STEP + s);
            multiply_fence();
#pragma unroll
            for (int s = 0; s < STEP; s++)
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const int k = q * STEP + s;
                    const u64 rows = x + (k / 4 * (X_BYTES / 2) + k % 4 * 32) / 16;
                    multiply(sums[t], fragment[q & 1][s][t], rows, k > 0 || i > 0);
                }
            multiply_commit();
            multiply_wait<1>();
            if (q == 0 && i > 0) reader.release(previous);
        }
        previous = current;
        if (AHEAD) share = next;
    }
    multiply_wait<0>();
    reader.release(previous);
}

#if OPERAND_BYTES == 2
__device__ __forceinline__ void add_stages_of_few(const Reader& reader, float (&sums)[TILES][SUMS], Share& share,
                                                  Turn& turn, int count);
#endif

__device__ __forceinline__ void add_stages(const Reader& reader, float (&sums)[TILES][SUMS], Share& share, Turn& turn,
                                           int count, bool more) {
#if OPERAND_BYTES == 2
    if (FEW) return add_stages_of_few(reader, sums, share, turn, count);
#endif
    add_stages_of_many(reader, sums, share, turn, count, more);
}
