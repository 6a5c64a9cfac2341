// Sums of decoded integers times few tokens by `mma`, which waits for nobody. Sums of groups are scaled: nothing is rounded
// before the result.
//
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
