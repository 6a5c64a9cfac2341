// The kernel of products of 8-bit codes: who produces, who consumes, and what becomes of sums.

constexpr int FACTORS = (ROWS + CONSUMERS - 1) / CONSUMERS;  // output features that a thread loads factors of
// What warpgroups leave for the first: of threads that have tokens at all, a half of whose sums is of tokens 8 apart.
constexpr int BUSY = TOKENS < 64 ? (TOKENS + 15) / 16 * 32 : 128;
constexpr int KEPT = TOKENS <= 8 ? SUMS / 2 : SUMS;
constexpr int LEFT_BYTES = (SPLIT - 1) * BUSY * KEPT * 4;
static_assert(SPLIT * SLICES == LINES * SLICES_OF_LINE && (SLICES % SLICES_OF_LINE == 0 || SLICES_OF_LINE % SLICES == 0),
              "warpgroups divide a stage");
static_assert(TOKENS <= 64 || TOKENS == 64 * WARPGROUPS, "a warpgroup has 64 tokens");

__device__ __forceinline__ void wait_for_warpgroups() { asm volatile("bar.sync 2, %0;" ::"n"(CONSUMERS) : "memory"); }

// What multiplies and follows the sums of output features: loaded by all threads before a tile, shared after it.
struct Factors {
    float scale[FACTORS], zero[FACTORS], bias[FACTORS];

    __device__ __forceinline__ void load(const Problem& p, int row, int thread) {
#pragma unroll
        for (int i = 0; i < FACTORS; i++) {
            const int n = row + thread + i * CONSUMERS;
            const bool inside = n < p.rows;
            scale[i] = inside ? p.row_scale[n] : 0.f;
            zero[i] = ZEROS && inside ? p.weight_sums[n] : 0.f;
            bias[i] = inside && p.bias ? widen(p.bias[n]) : 0.f;
        }
    }
    __device__ __forceinline__ void share(float* to, int thread) const {
#pragma unroll
        for (int i = 0; i < FACTORS; i++) {
            const int at = thread + i * CONSUMERS;
            if (at >= ROWS) continue;
            to[at] = scale[i], to[ROWS + at] = bias[i];
            if (ZEROS) to[2 * ROWS + at] = zero[i];
        }
    }
};

// Sums over stages. Warpgroups of up to 64 tokens divide input features, of more tokens.
__device__ __forceinline__ void add_stages(Sum (&sums)[TILES][SUMS], Turn& turn, int count, u32 stages, u32 full, u32 empty,
                                           int warpgroup, int lane) {
    const u32 first = SPLIT > 1 ? warpgroup * SLICES : 0, from = SPLIT > 1 ? 0 : warpgroup * 64 * LINE;
    const u32 line = first / SLICES_OF_LINE, slice = first % SLICES_OF_LINE * 32;
    const u32 x_at = stages + line * X_LINE + from + slice, weight_at = stages + X_BYTES + line * W_LINE + slice;
    u32 previous = 0;
    for (int i = 0; i < count; i++) {
        barrier_wait(full + 8 * turn.stage, turn.parity);
        const u32 at = x_at + turn.stage * STAGE_BYTES;
        const u64 x = TOKENS <= 8 ? describe_eight_rows(at) : describe_rows(at);
        const u64 weight = describe_rows(weight_at + turn.stage * STAGE_BYTES);
        multiply_fence();
#pragma unroll
        for (int s = 0; s < SLICES; s++) {
            multiply(sums[0], x + (s / SLICES_OF_LINE * X_LINE + s % SLICES_OF_LINE * 32) / 16,
                     weight + (s / SLICES_OF_LINE * W_LINE + s % SLICES_OF_LINE * 32) / 16, i > 0 || s > 0);
        }
        multiply_commit();
        multiply_wait<1>();
        if (i > 0) release_stage(empty, previous, lane);
        previous = turn.stage;
        turn.next();
    }
    multiply_wait<0>();
    release_stage(empty, previous, lane);
}

// The first warpgroup adds what the others found, in their order.
__device__ __forceinline__ void gather_sums(Sum (&sums)[TILES][SUMS], Sum* left, const Factors& own, float* factors, int thread) {
    const int warpgroup = thread / 128, at = thread % 128;
    wait_for_warpgroups();  // until the tile before is stored
    own.share(factors, thread);
    if (SPLIT > 1 && warpgroup > 0 && at < BUSY) {
        Sum* to = left + (warpgroup - 1) * BUSY * KEPT + at;
#pragma unroll
        for (int i = 0; i < KEPT; i++) to[i * BUSY] = sums[0][KEPT < SUMS ? i / 2 * 4 + i % 2 : i];
    }
    wait_for_warpgroups();
    if (SPLIT == 1 || warpgroup > 0 || at >= BUSY) return;
#pragma unroll
    for (int other = 0; other < SPLIT - 1; other++)
#pragma unroll
        for (int i = 0; i < KEPT; i++) sums[0][KEPT < SUMS ? i / 2 * 4 + i % 2 : i] += left[(other * KEPT + i) * BUSY + at];
}

// What a thread's two tokens, eight apart, are counted in.
struct Tokens {
    float scale[2], zero[2];

    __device__ __forceinline__ void load(const Problem& p, int token) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int at = min(token + 8 * e, p.tokens - 1);
            scale[e] = p.x_scale[at * p.scale_stride];
            zero[e] = ZEROS ? p.x_zero[at * p.zero_stride] : 0.f;
        }
    }
};

__device__ __forceinline__ u32 finished(const Sum* sums, const float* factors, int column, float scale, float zero) {
    const float2 by = *reinterpret_cast<const float2*>(factors + column);
    const float2 bias = *reinterpret_cast<const float2*>(factors + ROWS + column);
    float low = (float)sums[0], high = (float)sums[1];
    if (ZEROS) {  // products rounded as sums were, so that a token of zeros gives zeros
        const float2 of_zero = *reinterpret_cast<const float2*>(factors + 2 * ROWS + column);
        low = __fsub_rn(low, __fmul_rn(of_zero.x, zero));
        high = __fsub_rn(high, __fmul_rn(of_zero.y, zero));
    }
    low *= by.x, high *= by.y;
    return round_pair(low * scale + bias.x, high * scale + bias.y);
}

// A thread has two neighbouring output features of eight; two threads exchange theirs of the next eight to store four.
// `stride` is even, so that pairs are aligned.
__device__ __forceinline__ void store_result(const Problem& p, const Sum (&sums)[TILES][SUMS], Chunks mine,
                                             const float* factors, const Tokens& by, int token, int end, int row, int lane) {
    const bool in_fours = p.stride % 4 == 0, odd = lane % 2;
    u16* to = p.out + (u64)token * p.stride + row;
#pragma unroll
    for (int j = 0; j < CHUNKS; j += 2) {
#pragma unroll
        for (int e = 0; e < (TOKENS <= 8 ? 1 : 2); e++) {
            const bool inside = token + 8 * e < end;
            u16* at = to + (e ? 8 * p.stride : 0);
            u32 pair[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 2 && j + i < CHUNKS; i++)
                pair[i] = finished(&sums[0][(j + i) * 4 + 2 * e], factors, (j + i) * 8 + lane % 4 * 2, by.scale[e], by.zero[e]);
            if (j + 1 < CHUNKS && in_fours && mine.has(j) && mine.has(j + 1)) {
                const u32 other = __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 1);
                const int column = (j + odd) * 8 + lane % 4 / 2 * 4;
                if (inside && row + column < p.stride)
                    *reinterpret_cast<uint2*>(at + column) = odd ? make_uint2(other, pair[1]) : make_uint2(pair[0], other);
                continue;
            }
#pragma unroll
            for (int i = 0; i < 2 && j + i < CHUNKS; i++) {
                const int column = (j + i) * 8 + lane % 4 * 2;
                if (mine.has(j + i) && inside && row + column < p.stride) *reinterpret_cast<u32*>(at + column) = pair[i];
            }
        }
    }
}

__device__ __forceinline__ void consume(const Problem& p, const Walk& walk, u32 stages, u32 full, u32 empty, Sum* left,
                                        float* factors) {
    const int thread = threadIdx.x, warpgroup = thread / 128, lane = thread % 32, warp = thread / 32 % 4;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int inside = (SPLIT > 1 ? 0 : warpgroup * 64) + warp * 16 + lane / 4;  // a thread's first token of the tile
    Sum sums[TILES][SUMS];
    Turn turn;
    for (int step = walk.first; step < walk.end;) {
        const int tile = walk.tile(step / p.depths), from = step % p.depths;
        const int to = min(p.depths, from + walk.end - step);
        const Place place(p, tile, rank);
        const int token = place.token + inside, end = min(p.tokens, place.token + TOKENS);
        Factors own;
        own.load(p, place.row, thread);
        if (step == walk.first) wait_for_previous();
        Tokens by;
        by.load(p, token);
        step += to - from;
        add_stages(sums, turn, to - from, stages, full, empty, warpgroup, lane);
        gather_sums(sums, left, own, factors, thread);
        if (SPLIT > 1 && warpgroup > 0) continue;
        if (!WHOLE && p.parts > 1) {
            const int part = walk.index - tile * p.parts;
            const int last = (walk.clusters - 1 - tile * p.parts) * CLUSTER + rank;
            const Chunks mine(part, p.parts);
            exchange_sums(p, sums, thread, p.flags + tile * CLUSTER + rank, last, part, mine);
            store_result(p, sums, mine, factors, by, token, end, place.row, lane);
            continue;
        }
        if (!WHOLE && from > 0) {
            leave_sums(p, sums, thread);
            continue;
        }
        // Blocks of later ranges have lower indices, so that they started before this one, which waits for them.
        int others = 0;
        for (int found = step; !WHOLE && found < (tile + 1) * p.depths; others++)
            found = Range(walk.index + 1 + others, walk.clusters, p.tiles * p.depths).end;
        if (!WHOLE && others > 0) add_sums(p, sums, thread, (walk.clusters - 2 - walk.index) * CLUSTER + rank, others);
        store_result(p, sums, Chunks(0, 1), factors, by, token, end, place.row, lane);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + FEEDERS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        multiply_bytes(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                       const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    Sum* left = reinterpret_cast<Sum*>(memory + STAGES * (STAGE_BYTES + 16));
    begin_ring(full, empty);
    const Walk walk(p);
    if (threadIdx.x < CONSUMERS) {
#if REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
        consume(p, walk, stages, full, empty, left, reinterpret_cast<float*>(left) + LEFT_BYTES / 4);
    } else {
#if REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEEDER_REGISTERS));
#endif
        if (threadIdx.x == CONSUMERS) {
            prefetch_map(&x_map), prefetch_map(&weight_map);
            const bool read_once = p.token_tiles == 1;
            const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
            const Cursor begin(p, walk, rank);
            Fetch fetch = {&x_map, &weight_map, p, walk, rank, read_once ? policy_evict_first() : policy_evict_normal(),
                           policy_evict_normal(), begin, begin};
            produce(fetch, walk, stages, full, empty);
            let_next_launch();  // earlier it would take memory's time from this one
        }
    }
    if (CLUSTER > 1) cluster_sync();
}
