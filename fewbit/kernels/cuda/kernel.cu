// The kernel: who produces, who consumes, and what becomes of sums.

__device__ __forceinline__ void consume(const Problem& p, Range range, int index, int clusters, u32 stages, u32 full,
                                        u32 empty) {
    const int thread = threadIdx.x, warpgroup = thread / 128, lane = thread % 32, warp = thread / 32 % 4;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 units_at = stages + X_BYTES + warpgroup * TILES * UNIT_BYTES;
    const Reader reader = {stages, full, empty, units_at + thread % 128 * 16,
                           units_at + CODE_BYTES + (warp * 8 + lane / 4) * 4, lane};
    wait_for_previous();
    float sums[TILES][SUMS];
    Turn turn;
    Share share;
    if (AHEAD && range.first < range.end) {
        reader.wait(turn);
        reader.load(share, 0);
    }
    for (int step = range.first; step < range.end;) {
        const int tile = step / p.depths, from = step % p.depths;
        const int to = min(p.depths, from + range.end - step);
        step += to - from;
        add_stages(reader, sums, share, turn, to - from, step < range.end);
        const int unit = (tile / p.token_tiles * CLUSTER + rank) * UNITS + warpgroup * TILES;
        const int token = tile % p.token_tiles * TOKENS + lane % 4 * 2, row = unit * 64 + warp * 16 + lane / 4 * 2;
        if (p.parts > 1) {
            const int part = index - tile * p.parts, last = (clusters - 1 - tile * p.parts) * CLUSTER + rank;
            const Chunks mine(part, p.parts);
            exchange_sums(p, sums, thread, p.flags + tile * CLUSTER + rank, last, part, mine);
            store_result(p, sums, mine, token, row);
            continue;
        }
        if (from > 0) {
            leave_sums(p, sums, thread);
            continue;
        }
        // Blocks of later ranges have lower indices, so that they started before this one, which waits for them.
        int others = 0;
        for (int end = step; end < (tile + 1) * p.depths; others++) end = Range(index + 1 + others, clusters, p.work).end;
        if (others > 0) add_sums(p, sums, thread, (clusters - 2 - index) * CLUSTER + rank, others);
        store_result(p, sums, Chunks(0, 1), token, row);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 128, RESIDENTS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        multiply_fragments(const __grid_constant__ TensorMap x_map, const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    begin_ring(full, empty);
    let_next_launch();
    const int clusters = gridDim.x / CLUSTER, index = clusters - 1 - blockIdx.x / CLUSTER;
    const Range range(index, clusters, p.work);
    if (threadIdx.x >= THREADS) {
#if RESIDENTS == 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
#endif
        if (threadIdx.x == THREADS) {
            prefetch_map(&x_map);
            Fetch fetch = {&x_map, p, CLUSTER > 1 ? cluster_rank() : 0, policy_evict_first()};
            produce(fetch, range, stages, full, empty);
        }
    } else {
#if RESIDENTS == 1
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
        consume(p, range, index, clusters, stages, full, empty);
    }
    if (CLUSTER > 1) cluster_sync();
}
