// What a thread takes of a stage, and what becomes of its sums.

// What a thread needs of a stage's weights.
struct Share {
    static constexpr int SCALES = SCALE_WORDS ? SCALE_WORDS : 1;
    u32 codes[TILES][4 * CODE_LOADS], scales[TILES][SCALES], zeros[TILES][SCALES];

    __device__ __forceinline__ void load(u32 codes_at, u32 scales_at) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < CODE_LOADS; i++) {
                const uint4 found = load_shared16(codes_at + t * UNIT_BYTES + i * 2048);
                codes[t][4 * i] = found.x, codes[t][4 * i + 1] = found.y;
                codes[t][4 * i + 2] = found.z, codes[t][4 * i + 3] = found.w;
            }
#pragma unroll
            for (int i = 0; i < SCALE_WORDS; i++) {
                scales[t][i] = load_shared4(scales_at + t * UNIT_BYTES + i * 128);
                zeros[t][i] = HAS_ZERO ? load_shared4(scales_at + t * UNIT_BYTES + SCALE_BYTES + i * 128) : 0;
            }
        }
    }
};

// Where a thread finds its share of a stage, and what it counts stages by.
struct Reader {
    u32 stages, full, empty, codes_at, scales_at;
    int lane;

    __device__ __forceinline__ void wait(Turn turn) const { barrier_wait(full + 8 * turn.stage, turn.parity); }
    __device__ __forceinline__ void load(Share& share, u32 stage) const {
        share.load(codes_at + stage * STAGE_BYTES, scales_at + stage * STAGE_BYTES);
    }
    __device__ __forceinline__ void release(u32 stage) const { release_stage(empty, stage, lane); }
};

__device__ __forceinline__ float token_factor(const Problem& p, int token) {
    return OPERAND_BYTES == 2 ? 1.f : p.token_scale[token * p.scale_stride] * OPERANDS_COUNT;
}

// A thread has two neighbouring output features of every token of its own. `stride` is even, so that pairs are aligned.
__device__ __forceinline__ void store_result(const Problem& p, const float (&sums)[TILES][SUMS], Chunks mine, int token,
                                             int row) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int n = row + 64 * tile;
        const bool inside = n < p.stride;
        const float low = p.bias && n < p.rows ? widen(p.bias[n]) : 0.f;
        const float high = p.bias && n + 1 < p.rows ? widen(p.bias[n + 1]) : 0.f;
        const float2 of_rows = ROW_SCALED && inside ? *reinterpret_cast<const float2*>(p.row_scale + n) : make_float2(1.f, 1.f);
        u16* to = p.out + (u64)token * p.stride + n;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!inside || token + 2 * i + e >= p.tokens || !mine.has((tile * SUMS + i) / 4)) continue;
                const float scale = token_factor(p, token + 2 * i + e);
                const u32 pair = round_pair(sums[tile][i + e] * (scale * of_rows.x) + low,
                                            sums[tile][i + 2 + e] * (scale * of_rows.y) + high);
                *reinterpret_cast<u32*>(to + (u64)(2 * i + e) * p.stride) = pair;
            }
    }
}
