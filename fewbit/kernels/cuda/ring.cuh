// The ring of stages through which a block walks, filled by one producer thread.
//
// Compile-time: STAGES, STAGE_BYTES, CLUSTER (blocks that share what they read), WARPGROUPS.

// Stages of the ring, one after another.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A barrier for each stage that it is full, and one that it is empty.
__device__ __forceinline__ void begin_ring(u32 full, u32 empty) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, WARPGROUPS * 4 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
}

// Weights of as many stages as there are come before the kernel before has ended, tokens after it.
template <typename Fetch, typename Steps>
__device__ __forceinline__ void produce(Fetch& fetch, const Steps& range, u32 stages, u32 full, u32 empty) {
    const int ahead = min(STAGES, range.end - range.first);
    for (int i = 0; i < ahead; i++) fetch.weights(range.first + i, stages + i * STAGE_BYTES, full + 8 * i);
    wait_for_previous();
    for (int i = 0; i < ahead; i++) fetch.tokens(range.first + i, stages + i * STAGE_BYTES, full + 8 * i);
    u32 stage = 0, parity = 0;
    for (int step = range.first + ahead; step < range.end; step++) {
        const u32 at = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        barrier_wait(empty + 8 * stage, parity);
        fetch.weights(step, at, barrier);
        fetch.tokens(step, at, barrier);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Every warp says so to all that read for it.
__device__ __forceinline__ void release_stage(u32 empty, u32 stage, int lane) {
    if (CLUSTER > 1) {
        if (lane < CLUSTER) barrier_arrive_at(empty + 8 * stage, lane);
    } else if (lane == 0) {
        barrier_arrive(empty + 8 * stage);
    }
}
