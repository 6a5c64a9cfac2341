// Products of E4M3 codes whose weights have a scale for every row and group of 128 input features: what the tensor cores sum
// over a group is scaled and added in float32, while another warpgroup multiplies.
//
// Here output features are the left operand, 64 a warpgroup, so that a thread has two scales a group, and tokens the right
// one, in parts of WIDTH, whose sums of a group are in registers one after another. Constants and walk are those of
// `bytes.cuh`, with whole tiles and a line in a stage, whose scales lie beside: SCALE_WIDTH is 2 (bf16) or 4 (float32) bytes.

constexpr int WIDTH = TOKENS <= 192 ? TOKENS : 128;
constexpr int PARTS = TOKENS / WIDTH;
constexpr int PART_SUMS = WIDTH / 2;
constexpr int SCALE_BYTES = ROWS * SCALE_WIDTH;

__device__ __forceinline__ float load_scale(u32 address) {
    return __uint_as_float(SCALE_WIDTH == 4 ? load_shared4(address) : (u32)load_shared2(address) << 16);
}

struct Groups {
    const TensorMap *x_map, *weight_map;
    const Problem& p;
    const Walk& walk;
    u32 rank, scales;  // where stages of scales lie
    u64 policy;
    Cursor at;
    u32 stage;

    __device__ __forceinline__ void weights(int, u32, u32) {}

    __device__ __forceinline__ void tokens(int, u32 to, u32 barrier) {
        const u32 bytes = min(ROWS, p.rows - at.place.row) * SCALE_WIDTH;
        barrier_expect(barrier, STAGE_BYTES + bytes);
        copy_bytes(scales + stage * SCALE_BYTES, p.group_scale + ((u64)at.depth * p.rows + at.place.row) * SCALE_WIDTH, bytes,
                   barrier, policy);
        if (++stage == STAGES) stage = 0;
        copy_part<ROWS, SHARES_WEIGHT>(weight_map, to + X_BYTES, at.place.row, at.depth, rank, barrier, policy);
        copy_part<TOKENS, !SHARES_WEIGHT>(x_map, to, at.place.token, at.depth, rank, barrier, policy);
        at.next(p, walk, rank);
    }
};

// Two numbers of neighbouring rows for each of two tokens, out of a number of one row for both: the lane four further has
// the other row.
__device__ __forceinline__ u32 pair_rows(float first, float second, bool odd) {
    const float other = __shfl_xor_sync(~0u, odd ? first : second, 4);
    return odd ? round_pair(other, second) : round_pair(first, other);
}

__device__ __forceinline__ void store_columns(const Problem& p, const float (&sums)[PARTS][PART_SUMS], int token, int row,
                                              int lane) {
    const bool odd = lane / 4 % 2;
    const int mine = odd, end = min(p.tokens, token + TOKENS);
    float scale[2], bias[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int n = min(row + lane / 4 + 8 * e, p.rows - 1);
        scale[e] = p.row_scale[n];
        bias[e] = p.bias ? widen(p.bias[n]) : 0.f;
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < PART_SUMS; i += 4) {
            const int at = token + part * WIDTH + i * 2 + lane % 4 * 2;
            const float by[2] = {p.x_scale[min(at, p.tokens - 1) * p.scale_stride],
                                 p.x_scale[min(at + 1, p.tokens - 1) * p.scale_stride]};
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float* found = &sums[part][i + 2 * e];
                const u32 pair = pair_rows(found[0] * scale[e] * by[0] + bias[e], found[1] * scale[e] * by[1] + bias[e], odd);
                const int n = row + lane / 8 * 2 + 8 * e;
                if (at + mine < end && n < p.stride) *reinterpret_cast<u32*>(p.out + (u64)(at + mine) * p.stride + n) = pair;
            }
        }
}

__device__ __forceinline__ void consume(const Problem& p, const Walk& walk, u32 stages, u32 scales, u32 full, u32 empty) {
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 scale_at = scales + (warpgroup * 64 + warp * 16 + lane / 4) * SCALE_WIDTH;
    Turn turn;
    wait_for_previous();
    for (int step = walk.first; step < walk.end;) {
        const Place place(p, walk.tile(step / p.depths), rank);
        float sums[PARTS][PART_SUMS], found[PART_SUMS];
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int i = 0; i < PART_SUMS; i++) sums[part][i] = 0.f;
        for (const int end = step + p.depths; step < end; step++) {
            barrier_wait(full + 8 * turn.stage, turn.parity);
            const u32 at = stages + turn.stage * STAGE_BYTES, scales_at = scale_at + turn.stage * SCALE_BYTES;
            const u64 weight = describe_rows(at + X_BYTES + warpgroup * 64 * LINE), x = describe_rows(at);
            const float scale[2] = {load_scale(scales_at), load_scale(scales_at + 8 * SCALE_WIDTH)};
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                multiply_fence();
#pragma unroll
                for (int s = 0; s < 4; s++) multiply(found, weight + 2 * s, x + (part * WIDTH * LINE + s * 32) / 16, s > 0);
                multiply_commit();
                multiply_wait<0>();
                if (part == PARTS - 1) release_stage(empty, turn.stage, lane);
#pragma unroll
                for (int i = 0; i < PART_SUMS; i++) sums[part][i] += scale[i / 2 % 2] * found[i];
            }
            turn.next();
        }
        store_columns(p, sums, place.token, place.row + warpgroup * 64 + warp * 16, lane);
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + FEEDERS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        multiply_groups(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
                        const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    const u32 scales = empty + 8 * STAGES;
    begin_ring(full, empty);
    const Walk walk(p);
    if (threadIdx.x < CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        consume(p, walk, stages, scales, full, empty);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEEDER_REGISTERS));
        if (threadIdx.x == CONSUMERS) {
            prefetch_map(&x_map), prefetch_map(&weight_map);
            const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
            Groups fetch = {&x_map, &weight_map, p, walk, rank, scales, policy_evict_normal(), Cursor(p, walk, rank), 0};
            produce(fetch, walk, stages, full, empty);
        }
    }
    if (CLUSTER > 1) cluster_sync();
}
