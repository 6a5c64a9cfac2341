// Sums of decoded weights times tokens in E4M3: no sum of the tensor cores runs over more than a group, whose scale then
// multiplies it in float32, so that nothing is rounded. AHEAD does not apply.

constexpr bool AHEAD = false;
constexpr int PARTS = GROUP / 32;  // products of a group

__device__ __forceinline__ void add_scaled(float (&sums)[SUMS], const float (&found)[SUMS], u32 scales) {
    const float scale[2] = {widen(scales & 0xFFFF), widen(scales >> 16)};
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] += scale[i / 2 % 2] * found[i];
}

// The first tile's group is scaled while the second's is multiplied, the second's while another warpgroup multiplies.
__device__ __forceinline__ void add_stages(const Reader& reader, float (&sums)[TILES][SUMS], Share& share, Turn& turn,
                                           int count, bool) {
    static_assert(TILES <= 2, "a tile waits for one other");
    float found[TILES][SUMS];
    u32 fragment[TILES][PARTS][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sums[t][i] = 0.f;
    for (int i = 0; i < count; i++) {
        reader.wait(turn);
        reader.load(share, turn.stage);
        const u64 x = describe_rows(reader.stages + turn.stage * STAGE_BYTES);
#pragma unroll
        for (int g = 0; g < DEPTH / GROUP; g++) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int s = 0; s < PARTS; s++)
                    decode(fragment[t][s], &share.codes[t][(g * PARTS + s) * PRODUCT_WORDS], 0, 0, 0);
                multiply_fence();
#pragma unroll
                for (int s = 0; s < PARTS; s++)
                    multiply(found[t], fragment[t][s], x + (g * PARTS + s) * 2, s > 0);
                multiply_commit();
            }
            if (TILES == 2) {
                multiply_wait<1>();
                add_scaled(sums[0], found[0], share.scales[0][g]);
            }
            multiply_wait<0>();
            add_scaled(sums[TILES - 1], found[TILES - 1], share.scales[TILES - 1][g]);
        }
        reader.release(turn.stage);
        turn.next();
    }
}
