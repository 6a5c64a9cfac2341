// y [M, N] = x [M, K] @ W [N, K]^T for weights of 4 or 8 bits on Hopper: the ring of stages and the cutting of the work.
//
// Weights are the left operand of the tensor cores, decoded in registers, tokens the right one, from shared memory. A block
// takes WARPGROUPS * TILES * 64 output features by TOKENS tokens; one producer thread fills a ring of stages, 128 input
// features each. Blocks stay: the work, tiles by steps of K, is cut into equal ranges, and where a range ends inside a
// tile, the block that has the tile's first step adds what the others found, in their order.
//
// Compile-time: TOKENS, WARPGROUPS, TILES, STAGES, CLUSTER (blocks that share x), RESIDENTS (blocks that a
// multiprocessor has room for, so that the next kernel's wait there), REGISTERS and PRODUCER_REGISTERS
// of a thread where there is room for one block, and what `fragments.cuh` needs.

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

// The part of the work that a cluster has, in steps of K, and how it walks through tiles.
struct Range {
    int first, end;
    __device__ __forceinline__ Range(int index, int clusters, int work)
        : first((u64)index * work / clusters), end((u64)(index + 1) * work / clusters) {}
};

struct Problem {
    const unsigned char* weight;  // [units of 64 rows, depths, UNIT_BYTES]
    u16* out;                     // [M, stride], of which N columns count
    const u16* bias;              // [N] or null
    const float* token_scale;     // [M] or [] for tokens in E4M3
    float* partial;               // [blocks, sums of a block]
    u32* flags;                   // [blocks], zero between launches
    int tokens, rows, stride, units, depths, token_tiles, work, parts, scale_stride;
    const float* row_scale;  // [units * 64] where ROW_SCALED
};

// What of a step of the work lies where.
struct Place {
    int depth, token, unit;
    __device__ __forceinline__ Place(const Problem& p, int step, int rank) {
        const int tile = step / p.depths;
        depth = step - tile * p.depths;
        token = tile % p.token_tiles * TOKENS;
        unit = (tile / p.token_tiles * CLUSTER + rank) * UNITS;
    }
};

__device__ __forceinline__ void fetch_weights(const Problem& p, int step, u32 rank, u32 to, u32 barrier, u64 policy) {
    const Place place(p, step, rank);
    barrier_expect(barrier, X_BYTES + W_BYTES);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const u64 unit = min(place.unit + i, p.units - 1);  // a block may be taller than what is left of the weight
        copy_bytes(to + i * UNIT_BYTES, p.weight + (unit * p.depths + place.depth) * UNIT_BYTES, UNIT_BYTES, barrier,
                   policy);
    }
}

// Every block of a cluster fetches its part of the tokens for all.
__device__ __forceinline__ void fetch_tokens(const TensorMap* x_map, const Problem& p, int step, u32 rank, u32 to,
                                             u32 barrier) {
    constexpr int PART = TOKENS / CLUSTER;
    const Place place(p, step, rank);
#pragma unroll
    for (int box = 0; box < OPERAND_BYTES; box++) {
        const u32 at = to + (box * TOKENS + rank * PART) * 128;
        const int column = place.depth * DEPTH + box * (128 / OPERAND_BYTES), row = place.token + rank * PART;
        if (CLUSTER > 1)
            copy_box_to(at, x_map, column, row, barrier, (1 << CLUSTER) - 1);
        else
            copy_box(at, x_map, column, row, barrier);
    }
}

__device__ __forceinline__ void produce(const TensorMap* x_map, const Problem& p, Range range, u32 stages, u32 full,
                                        u32 empty) {
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u64 policy = policy_evict_first();
    prefetch_map(x_map);
    const int ahead = min(STAGES, range.end - range.first);
    for (int i = 0; i < ahead; i++)
        fetch_weights(p, range.first + i, rank, stages + i * STAGE_BYTES + X_BYTES, full + 8 * i, policy);
    wait_for_previous();
    for (int i = 0; i < ahead; i++)
        fetch_tokens(x_map, p, range.first + i, rank, stages + i * STAGE_BYTES, full + 8 * i);
    u32 stage = 0, parity = 0;
    for (int step = range.first + ahead; step < range.end; step++) {
        const u32 at = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
        barrier_wait(empty + 8 * stage, parity);
        fetch_weights(p, step, rank, at + X_BYTES, barrier, policy);
        fetch_tokens(x_map, p, step, rank, at, barrier);
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

// Which of the CHUNKS of four sums that a thread has its block adds up and stores.
constexpr int CHUNKS = TILES * SUMS / 4;

struct Chunks {
    int first, end;
    __device__ __forceinline__ Chunks(int part, int parts) : first(part * CHUNKS / parts), end((part + 1) * CHUNKS / parts) {}
    __device__ __forceinline__ bool has(int chunk) const { return chunk >= first && chunk < end; }
};

// Adds what `count` blocks left, in their order, `block` first, without `itself`.
__device__ __forceinline__ void add_left(const Problem& p, float (&sums)[TILES][SUMS], int thread, int block, int count,
                                         int itself, Chunks mine) {
    constexpr int LOADS = CHUNKS < 4 ? CHUNKS : 4;  // in flight
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i == itself) continue;
        const float* from = p.partial + (u64)(block - i * CLUSTER) * (CHUNKS * 4 * THREADS) + 4 * thread;
#pragma unroll
        for (int batch = 0; batch < CHUNKS; batch += LOADS) {
            float4 found[LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; j++)
                if (mine.has(batch + j)) found[j] = load_floats(from + (batch + j) * 4 * THREADS);
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                if (!mine.has(batch + j)) continue;
                float* to = &sums[(batch + j) * 4 / SUMS][(batch + j) * 4 % SUMS];
                to[0] += found[j].x, to[1] += found[j].y, to[2] += found[j].z, to[3] += found[j].w;
            }
        }
    }
}

// What the blocks of the `count` ranges after this one's left of the tile.
__device__ __forceinline__ void add_sums(const Problem& p, float (&sums)[TILES][SUMS], int thread, int block, int count) {
    for (int i = thread; i < count; i += THREADS) flag_take(p.flags + block - i * CLUSTER);
    wait_for_consumers();
    add_left(p, sums, thread, block, count, -1, Chunks(0, 1));
}

// Where all ranges are as long and a tile is `parts` of them, every block adds its share of the tile's sums up. All blocks
// of a launch are there at once.
__device__ __forceinline__ void exchange_sums(const Problem& p, float (&sums)[TILES][SUMS], int thread, u32* flag, int block,
                                              int part, Chunks mine) {
    float* to = p.partial + (u64)blockIdx.x * (CHUNKS * 4 * THREADS) + 4 * thread;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
        if (!mine.has(chunk)) store_floats(to + chunk * 4 * THREADS, &sums[chunk * 4 / SUMS][chunk * 4 % SUMS]);
    wait_for_consumers();
    if (thread == 0) flag_count(flag, p.parts);
    wait_for_consumers();
    add_left(p, sums, thread, block, p.parts, part, mine);
    wait_for_consumers();
    if (thread == 0) flag_leave(flag, p.parts);
}

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
        if (CLUSTER > 1) {
            if (lane < CLUSTER) barrier_arrive_at(empty + 8 * stage, lane);
        } else if (lane == 0) {
            barrier_arrive(empty + 8 * stage);
        }
    }
};
