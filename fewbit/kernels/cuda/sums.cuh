// Sums of a tile that several blocks have parts of: where a range ends inside a tile, the block that has the tile's first
// step adds what the others found, in their order; or every block adds a share of them.
//
// Before this: Sum (float or int), TILES and SUMS (of a thread: TILES times SUMS), THREADS (of a block that have sums),
// CLUSTER, and a Problem with `partial`, `flags` and `parts`.

typedef decltype(load_four((const Sum*)nullptr)) Four;

__device__ __forceinline__ void wait_for_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Sums of one unit after another: thread-contiguous in chunks of four.
__device__ __forceinline__ void leave_sums(const Problem& p, const Sum (&sums)[TILES][SUMS], int thread) {
    Sum* to = p.partial + (u64)blockIdx.x * (TILES * SUMS * THREADS) + 4 * thread;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) store_four(to + (tile * SUMS + i) * THREADS, &sums[tile][i]);
    wait_for_consumers();
    if (thread == 0) flag_set(p.flags + blockIdx.x);
}

// Which of the CHUNKS of four sums that a thread has its block adds up and stores.
constexpr int CHUNKS = TILES * SUMS / 4;

struct Chunks {
    int first, end;
    __device__ __forceinline__ Chunks(int part, int parts) : first(part * CHUNKS / parts), end((part + 1) * CHUNKS / parts) {}
    __device__ __forceinline__ bool has(int chunk) const { return chunk >= first && chunk < end; }
};

// Adds what `count` blocks left, in their order, `block` first, without `itself`.
__device__ __forceinline__ void add_left(const Problem& p, Sum (&sums)[TILES][SUMS], int thread, int block, int count,
                                         int itself, Chunks mine) {
    constexpr int LOADS = CHUNKS < 4 ? CHUNKS : 4;  // in flight
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i == itself) continue;
        const Sum* from = p.partial + (u64)(block - i * CLUSTER) * (CHUNKS * 4 * THREADS) + 4 * thread;
#pragma unroll
        for (int batch = 0; batch < CHUNKS; batch += LOADS) {
            Four found[LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; j++)
                if (mine.has(batch + j)) found[j] = load_four(from + (batch + j) * 4 * THREADS);
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                if (!mine.has(batch + j)) continue;
                Sum* to = &sums[(batch + j) * 4 / SUMS][(batch + j) * 4 % SUMS];
                to[0] += found[j].x, to[1] += found[j].y, to[2] += found[j].z, to[3] += found[j].w;
            }
        }
    }
}

// What the blocks of the `count` ranges after this one's left of the tile.
__device__ __forceinline__ void add_sums(const Problem& p, Sum (&sums)[TILES][SUMS], int thread, int block, int count) {
    for (int i = thread; i < count; i += THREADS) flag_take(p.flags + block - i * CLUSTER);
    wait_for_consumers();
    add_left(p, sums, thread, block, count, -1, Chunks(0, 1));
}

// Where all ranges are as long and a tile is `parts` of them, every block adds its share of the tile's sums up. All blocks
// of a launch are there at once.
__device__ __forceinline__ void exchange_sums(const Problem& p, Sum (&sums)[TILES][SUMS], int thread, u32* flag, int block,
                                              int part, Chunks mine) {
    Sum* to = p.partial + (u64)blockIdx.x * (CHUNKS * 4 * THREADS) + 4 * thread;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        if (!mine.has(chunk)) store_four(to + chunk * 4 * THREADS, &sums[chunk * 4 / SUMS][chunk * 4 % SUMS]);
    wait_for_consumers();
    if (thread == 0) flag_count(flag, p.parts);
    wait_for_consumers();
    add_left(p, sums, thread, block, p.parts, part, mine);
    wait_for_consumers();
    if (thread == 0) flag_leave(flag, p.parts);
}
