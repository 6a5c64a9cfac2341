// Sums of decoded weights times few tokens by `mma`, which waits for nobody; what scales groups multiplies weights.

__device__ __forceinline__ void add_stages_of_few(const Reader& reader, float (&sums)[TILES][SUMS], Share& share,
                                                  Turn& turn, int count) {
    const int row = reader.lane % 8, part = reader.lane / 8;
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
            u32 columns[TOKENS / 8][4];
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++)
                load_matrices(columns[j], x + k / 4 * (X_BYTES / 2) + j * 1024 + ((k % 4 * 2 + part) ^ row) * 16);
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    u32 fragment[4];
                    decode_step(fragment, share, t, k + s);
#pragma unroll
                    for (int j = 0; j < TOKENS / 8; j++) multiply_eight(&sums[t][4 * j], fragment, &columns[j][2 * s]);
                }
        }
        __syncwarp();
        reader.release(turn.stage);
        turn.next();
    }
}
