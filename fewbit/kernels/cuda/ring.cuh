// y [M, N] = x [M, K] @ W [N, K]^T for weights of 4 bits on Hopper: the ring of stages and the cutting of the work.
//
// Weights are the left operand of the tensor cores, decoded in registers, tokens the right one, from shared memory. A block
// takes WARPGROUPS * TILES * 64 output features by TOKENS tokens; one producer thread fills a ring of stages, 128 input
// features each. Blocks stay: the work, tiles by steps of K, is cut into equal ranges, and where a range ends inside a
// tile, the block that has the tile's first step adds what the others found, in their order.
//
// Compile-time: TOKENS, WARPGROUPS, TILES, STAGES, PARTS (blocks of a cluster that share a tile, which is then not cut
// otherwise), RECEIVED_APART (bytes), RESIDENTS (blocks that a multiprocessor has room for, so that the next kernel's wait
// there), OPERAND_BYTES (of an input feature: 2, or 1 for E4M3), REGISTERS and PRODUCER_REGISTERS of a thread where there is
// room for one block, and what `fragments.cuh` needs.

constexpr int UNITS = WARPGROUPS * TILES;
constexpr int X_BYTES = TOKENS * DEPTH * OPERAND_BYTES;
constexpr int W_BYTES = UNITS * UNIT_BYTES;
constexpr int STAGE_BYTES = (X_BYTES + W_BYTES + 1023) / 1024 * 1024;
constexpr int THREADS = WARPGROUPS * 128;
constexpr int SUMS = TOKENS / 2;

__device__ __forceinline__ uint4 load_shared16(u32 address) {
    uint4 found;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "r"(address));
    return found;
}

__device__ __forceinline__ u32 load_shared4(u32 address) {
    u32 found;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(found) : "r"(address));
    return found;
}

// The part of the work that a block has, in steps of K.
struct Range {
    int first, end;
    __device__ __forceinline__ Range(int index, int work)
        : first((u64)index * work / gridDim.x), end((u64)(index + 1) * work / gridDim.x) {}
};

struct Problem {
    const unsigned char* weight;  // [units of 64 rows, depths, UNIT_BYTES]
    u16* out;                     // [M, stride], of which N columns count
    const u16* bias;              // [N] or null
    const float* token_scale;     // [M] or [] for tokens in E4M3
    float* partial;               // [blocks, sums of a block]
    u32* flags;                   // [blocks], zero between launches
    int tokens, rows, stride, units, depths, token_tiles, work, scale_stride;
};

// What of a step of the work lies where.
struct Place {
    int depth, token, unit;
    __device__ __forceinline__ Place(const Problem& p, int step) {
        const int tile = step / p.depths;
        depth = step - tile * p.depths;
        token = tile % p.token_tiles * TOKENS;
        unit = tile / p.token_tiles * UNITS;
    }
};

__device__ __forceinline__ void fetch_weights(const Problem& p, int step, u32 to, u32 barrier, u64 policy) {
    const Place place(p, step);
    barrier_expect(barrier, X_BYTES + W_BYTES);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const u64 unit = min(place.unit + i, p.units - 1);  // a block may be taller than what is left of the weight
        copy_bytes(to + i * UNIT_BYTES, p.weight + (unit * p.depths + place.depth) * UNIT_BYTES, UNIT_BYTES, barrier,
                   policy);
    }
}

__device__ __forceinline__ void fetch_tokens(const TensorMap* x_map, const Problem& p, int step, u32 to, u32 barrier) {
    const Place place(p, step);
#pragma unroll
    for (int box = 0; box < OPERAND_BYTES; box++)
        copy_box(to + box * TOKENS * 128, x_map, place.depth * DEPTH + box * (128 / OPERAND_BYTES), place.token, barrier);
}

__device__ __forceinline__ void produce(const TensorMap* x_map, const Problem& p, Range range, u32 stages, u32 full,
                                        u32 empty) {
    const u64 policy = policy_evict_first();
    prefetch_map(x_map);
    const int ahead = min(STAGES, range.end - range.first);
    for (int i = 0; i < ahead; i++)
        fetch_weights(p, range.first + i, stages + i * STAGE_BYTES + X_BYTES, full + 8 * i, policy);
    wait_for_previous();
    for (int i = 0; i < ahead; i++)
        fetch_tokens(x_map, p, range.first + i, stages + i * STAGE_BYTES, full + 8 * i);
    u32 stage = 0, parity = 0;
    for (int step = range.first + ahead; step < range.end; step++) {
        const u32 at = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        barrier_wait(empty + 8 * stage, parity);
        fetch_weights(p, step, at + X_BYTES, barrier, policy);
        fetch_tokens(x_map, p, step, at, barrier);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

__device__ __forceinline__ void wait_for_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

// Sums of one unit after another: thread-contiguous in chunks of four.
__device__ __forceinline__ void leave_sums(const Problem& p, const float (&sums)[TILES][SUMS], int thread) {
    float* to = p.partial + (u64)blockIdx.x * (TILES * SUMS * THREADS) + 4 * thread;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) store_floats(to + (tile * SUMS + i) * THREADS, &sums[tile][i]);
    wait_for_consumers();
    if (thread == 0) flag_set(p.flags + blockIdx.x);
}

// Which of the CHUNKS of four sums that a thread has its block stores.
constexpr int CHUNKS = TILES * SUMS / 4;

struct Chunks {
    int first, end;
    __device__ __forceinline__ bool has(int chunk) const { return chunk >= first && chunk < end; }
};

// Adds what the blocks of the `count` ranges after this one's left of the tile, in their order, once all have.
__device__ __forceinline__ void add_sums(const Problem& p, float (&sums)[TILES][SUMS], int thread, int block, int count) {
    for (int i = thread; i < count; i += THREADS) flag_take(p.flags + block - i);
    wait_for_consumers();
    constexpr int LOADS = CHUNKS < 4 ? CHUNKS : 4;  // in flight
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const float* from = p.partial + (u64)(block - i) * (CHUNKS * 4 * THREADS) + 4 * thread;
#pragma unroll
        for (int batch = 0; batch < CHUNKS; batch += LOADS) {
            float4 found[LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; j++) found[j] = load_floats(from + (batch + j) * 4 * THREADS);
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                float* to = &sums[(batch + j) * 4 / SUMS][(batch + j) * 4 % SUMS];
                to[0] += found[j].x, to[1] += found[j].y, to[2] += found[j].z, to[3] += found[j].w;
            }
        }
    }
}

__device__ __forceinline__ float token_factor(const Problem& p, int token) {
    return OPERAND_BYTES == 2 ? 1.f : p.token_scale[token * p.scale_stride] * 512.f;
}

// Where the blocks of a cluster are the PARTS of a tile, each adds up a slice of the sums, through shared memory: behind the
// stages, or in their place once every block has done with them.
constexpr int SLICE = CHUNKS < PARTS ? 1 : CHUNKS / PARTS;
constexpr int RECEIVED_BYTES = PARTS * SLICE * THREADS * 16;
constexpr bool RECEIVES_IN_RING = RECEIVED_BYTES > RECEIVED_APART;

__device__ __forceinline__ Chunks gather_sums(float (&sums)[TILES][SUMS], u32 stages, int thread) {
    const int rank = cluster_rank();
    const u32 received = stages + (RECEIVES_IN_RING ? 0 : STAGES * (STAGE_BYTES + 16)) + 16 * thread;
    if (RECEIVES_IN_RING) cluster_sync();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        if (chunk / SLICE != rank)
            store_floats_at(received + (rank * SLICE + chunk % SLICE) * (THREADS * 16), chunk / SLICE,
                            &sums[chunk * 4 / SUMS][chunk * 4 % SUMS]);
    cluster_sync();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk / SLICE != rank) continue;
        float* to = &sums[chunk * 4 / SUMS][chunk * 4 % SUMS];
#pragma unroll
        for (int other = 0; other < PARTS; other++) {
            if (other == rank) continue;
            const float4 found = load_shared_floats(received + (other * SLICE + chunk % SLICE) * (THREADS * 16));
            to[0] += found.x, to[1] += found.y, to[2] += found.z, to[3] += found.w;
        }
    }
    return {rank * SLICE, (rank + 1) * SLICE};
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
        u16* to = p.out + (u64)token * p.stride + n;
#pragma unroll
        for (int i = 0; i < SUMS; i += 4)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (!inside || token + 2 * i + e >= p.tokens || !mine.has((tile * SUMS + i) / 4)) continue;
                const float scale = token_factor(p, token + 2 * i + e);
                const u32 pair = round_pair(sums[tile][i + e] * scale + low, sums[tile][i + 2 + e] * scale + high);
                *reinterpret_cast<u32*>(to + (u64)(2 * i + e) * p.stride) = pair;
            }
    }
}

// What a thread needs of a stage's weights.
struct Share {
    u32 codes[TILES][DEPTH / 16], scales[TILES][DEPTH / GROUP], zeros[TILES][DEPTH / GROUP];

    __device__ __forceinline__ void load(u32 codes_at, u32 scales_at) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 found = load_shared16(codes_at + t * UNIT_BYTES + half * (CODE_BYTES / 2));
                codes[t][4 * half] = found.x, codes[t][4 * half + 1] = found.y;
                codes[t][4 * half + 2] = found.z, codes[t][4 * half + 3] = found.w;
            }
#pragma unroll
            for (int g = 0; g < DEPTH / GROUP; g++) {
                scales[t][g] = load_shared4(scales_at + t * UNIT_BYTES + g * 128);
                zeros[t][g] = HAS_ZERO ? load_shared4(scales_at + t * UNIT_BYTES + SCALE_BYTES + g * 128) : 0;
            }
        }
    }
};

// Stages of the ring, one after another.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
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
    __device__ __forceinline__ void release(u32 stage) const {
        if (lane == 0) barrier_arrive(empty + 8 * stage);
    }
};
