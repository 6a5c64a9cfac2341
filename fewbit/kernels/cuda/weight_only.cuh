// Sums of decoded weights times tokens in bf16 or fp16.
//
// Compile-time: STEP (16 input features each, decoded at once), AHEAD (see `add_stages`).

constexpr bool FEW = TOKENS <= 16;
constexpr int STEPS = DEPTH / 16 / STEP;

// Codes for few tokens, which scales do not multiply. For up to eight tokens zeros are taken from sums, which costs one more
// product for all tiles and saves an instruction in a register: codes plus UNPACKED_LESS, from UNPACKED_BASE on where zeros
// are 8. Products are what limits more tokens.
constexpr bool ZEROS_LATER = TOKENS <= 8;
constexpr float UNPACKED_LESS = HALF ? 1024.f : 0.f;
constexpr float UNPACKED_BASE = HALF ? 8.f : 136.f;
constexpr u32 ONES = HALF ? 0x3C003C00 : 0x3F803F80;

__device__ __forceinline__ void unpack(u32 (&fragment)[4], u32 codes, u32 zeros) {
    const u32 zero[2] = {HAS_ZERO ? both_low(zeros) : OFFSET, HAS_ZERO ? both_high(zeros) : OFFSET};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 raw = to_floats(codes >> 4 * i);
        if (ZEROS_LATER)
            fragment[i] = HALF ? subtract_pair(raw, MAGIC) : raw;  // fp16 counts from 1,024, which would cost precision
        else
            fragment[i] = subtract_pair(raw, zero[i & 1]);
    }
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
                for (int t = 0; t < TILES; t++) {
                    const int k = q * STEP + s, g = k * 16 / GROUP;
                    decode(fragment[q & 1][s][t], share.codes[t][k], share.scales[t][g], share.zeros[t][g]);
                }
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

// The same for few tokens by `mma`, which waits for nobody. Sums of groups are scaled: nothing is rounded before the result.
__device__ __forceinline__ void add_stages_of_few(const Reader& reader, float (&sums)[TILES][SUMS], Share& share,
                                                  Turn& turn, int count) {
    const int row = reader.lane % 8, part = reader.lane / 8;
    float found[TILES][SUMS], of_x[SUMS];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[t][i] = 0.f;
    for (int i = 0; i < count; i++) {
        reader.wait(turn);
        reader.load(share, turn.stage);
        const u32 x = reader.stages + turn.stage * STAGE_BYTES + row * 128;
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k += 2) {
            const int g = k * 16 / GROUP;
            if (k * 16 % GROUP == 0) {
#pragma unroll
                for (int j = 0; j < SUMS; j++) {
                    of_x[j] = 0.f;
#pragma unroll
                    for (int t = 0; t < TILES; t++) found[t][j] = 0.f;
                }
            }
#pragma unroll
            for (int tokens = 0; tokens < TOKENS; tokens += 8) {
                u32 columns[4];
                load_matrices(columns, x + k / 4 * (X_BYTES / 2) + tokens * 128 + ((k % 4 * 2 + part) ^ row) * 16);
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    const u32 ones[4] = {ONES, ONES, ONES, ONES};
                    if (ZEROS_LATER) multiply_eight(&of_x[tokens / 2], ones, &columns[2 * s]);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        u32 fragment[4];
                        unpack(fragment, share.codes[t][k + s], share.zeros[t][g]);
                        multiply_eight(&found[t][tokens / 2], fragment, &columns[2 * s]);
                    }
                }
            }
            if ((k + 2) * 16 % GROUP == 0) {
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int j = 0; j < SUMS; j++) {
                        const u16 scale = share.scales[t][g] >> (j & 2) * 8, zero = share.zeros[t][g] >> (j & 2) * 8;
                        const float base = HAS_ZERO ? widen(zero) - UNPACKED_LESS : UNPACKED_BASE;
                        sums[t][j] += widen(scale) * (ZEROS_LATER ? found[t][j] - base * of_x[j] : found[t][j]);
                    }
            }
        }
        __syncwarp();
        reader.release(turn.stage);
        turn.next();
    }
}

__device__ __forceinline__ void add_stages(const Reader& reader, float (&sums)[TILES][SUMS], Share& share, Turn& turn,
                                           int count, bool more) {
    if (FEW)
        add_stages_of_few(reader, sums, share, turn, count);
    else
        add_stages_of_many(reader, sums, share, turn, count, more);
}
