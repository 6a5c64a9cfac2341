// The kernel for few rows of x.

// Sums of a warp's tiles over its units of input features, from the first that it has.
__device__ __forceinline__ void add_depths(Sums (&sums)[TILES], const Block& block, const Weights& weights, int tokens,
                                           int first) {
    u32 stage = weights.ring;
#pragma unroll 1
    for (int depth = first; depth < block.end; depth += DEPTH_WARPS) {
        const Features x(block, tokens, depth, weights.lane);
        copies_wait<STAGES - 1>();
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const Share share(stage, t, weights.lane);
            add_products(sums[t], share, x);
        }
        __syncwarp();
        weights.fetch(depth + STAGES * DEPTH_WARPS, block.end, stage);
        stage = stage == weights.ring + (STAGES - 1) * STAGE_BYTES ? weights.ring : stage + STAGE_BYTES;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        multiply_few_rows(const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char memory[];
    let_next_launch();
    const Block block(p, shared_address(memory));
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, first = block.first + warp / ROW_WARPS;
    const u32 mine = block.ring + warp * WARP_BYTES;
    const Weights weights(p, block.first_tile + warp % ROW_WARPS * TILES, mine, lane);
    const auto fetch = [&](int stage) {
        weights.fetch(first + stage * DEPTH_WARPS, block.end, mine + stage * STAGE_BYTES);
    };
#pragma unroll
    for (int stage = 0; stage < EARLY; stage++) fetch(stage);
    prepare_features(p, block, [&] {
#pragma unroll
        for (int stage = EARLY; stage < STAGES; stage++) fetch(stage);
    });
    Sums sums[TILES] = {};
    add_depths(sums, block, weights, p.tokens, first);
    copies_wait<0>();
    __syncwarp();
#pragma unroll
    for (int t = 0; t < TILES; t++) leave_sums(mine + t * 512, sums[t], lane);
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    add_up(p, block);
    if (CLUSTER > 1) cluster_sync();
}
