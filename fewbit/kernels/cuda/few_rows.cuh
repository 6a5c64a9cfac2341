// y [M, N] = x [M, K] @ W [N, K]^T for up to 8 rows of x and weights of 4 bits on Hopper, where nothing counts but reading
// the weights: the ring that brings them, and how sums are added up.
//
// A warp takes TILES tiles of 16 output features, and every DEPTH_WARPS-th of the units of 128 input features that its block
// has. Each thread copies the codes that it will decode into shared memory itself, STAGES units ahead, so that warps wait for
// nobody until their sums are added up. EARLY stages are asked for before the kernel before has ended, the others behind x,
// which would wait for them all.
//
// Compile-time: TILES, ROW_WARPS, DEPTH_WARPS, STAGES, EARLY, CLUSTER (blocks that K is cut over), and what `fragments.cuh`
// needs.

constexpr int WARPS = ROW_WARPS * DEPTH_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int BLOCK_TILES = ROW_WARPS * TILES;
constexpr int GROUPS = DEPTH / GROUP;
constexpr int TILE_CODES = 16 * DEPTH / 2;
constexpr int TILE_SCALES = 32 * GROUPS;
constexpr int TILE_PIECES = TILE_SCALES * (1 + HAS_ZERO) / 16;  // of scales and zero points, that threads copy one by one
constexpr int PIECES = (TILES * TILE_PIECES + 31) / 32;         // of a thread
constexpr int STAGE_BYTES = TILES * (TILE_CODES + TILE_PIECES * 16);
constexpr int WARP_BYTES = STAGES * STAGE_BYTES;
constexpr int RING_BYTES = WARPS * WARP_BYTES;
static_assert(TILE_CODES >= 512, "sums of a tile lie where its codes lay");

struct Problem {
    const unsigned char* weight;  // [units of 64 rows, depths, UNIT_BYTES]
    u16* out;                     // [M, stride], of which N columns count
    const u16* x;                 // [M, K]
    const u16* bias;              // [N] or null
    int tokens, rows, columns, stride, tiles, depths;
};

// Where a block finds what, and which part of the work it has.
struct Block {
    u32 ring, features, rank;
    int first_tile, first, end;

    __device__ __forceinline__ Block(const Problem& p, u32 memory)
        : ring(memory), features(memory + RING_BYTES), rank(CLUSTER > 1 ? cluster_rank() : 0),
          first_tile(blockIdx.x / CLUSTER * BLOCK_TILES), first(rank * p.depths / CLUSTER),
          end((rank + 1) * p.depths / CLUSTER) {}
};

__device__ __forceinline__ void store_shared4(u32 address, u32 from) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(from) : "memory");
}

__device__ __forceinline__ void store_shared16(u32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// From the same address of the block `rank` of the cluster.
__device__ __forceinline__ float4 load_shared_of(u32 address, u32 rank) {
    float4 found;
#if CLUSTER > 1
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
        : "r"(address), "r"(rank)
        : "memory");
#else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w)
                 : "r"(address)
                 : "memory");
#endif
    return found;
}

// Copies of 16 bytes that a thread makes and waits for itself.

__device__ __forceinline__ void copy_piece(u32 to, const unsigned char* from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// What a thread has of a tile's 128 input features.
struct Share {
    u32 codes[8], scales[GROUPS], zeros[GROUPS];

    __device__ __forceinline__ Share(u32 stage, int t, int lane) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 found = load_shared16(stage + t * TILE_CODES + half * (TILE_CODES / 2) + lane * 16);
            codes[4 * half] = found.x, codes[4 * half + 1] = found.y;
            codes[4 * half + 2] = found.z, codes[4 * half + 3] = found.w;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const u32 at = stage + TILES * TILE_CODES + t * (TILE_PIECES * 16) + g * 32 + lane / 4 * 4;
            scales[g] = load_shared4(at);
            zeros[g] = HAS_ZERO ? load_shared4(at + TILE_SCALES) : 0;
        }
    }
};

// Where a thread finds its share of the weight, in bytes from the codes of input feature 0 on, and where it puts it.
struct Weights {
    const unsigned char* from;
    u64 policy;
    u32 ring, codes[TILES], pieces[PIECES];
    int lane;

    __device__ __forceinline__ Weights(const Problem& p, int first_tile, u32 ring, int lane)
        : from(p.weight), policy(policy_evict_first()), ring(ring), lane(lane) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const int tile = min(first_tile + t, p.tiles - 1);
            codes[t] = (u32)(tile / 4 * p.depths) * UNIT_BYTES + tile % 4 * (TILE_CODES / 2) + lane * 16;
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int piece = i * 32 + lane, tile = min(first_tile + piece / TILE_PIECES, p.tiles - 1);
            const int part = piece % TILE_PIECES;
            pieces[i] = (u32)(tile / 4 * p.depths) * UNIT_BYTES + CODE_BYTES + part / 2 * 128 + tile % 4 * 32 + part % 2 * 16;
        }
    }

    __device__ __forceinline__ void fetch(int depth, int end, u32 stage) const {
        if (depth < end) {
            const unsigned char* unit = from + (u64)depth * UNIT_BYTES;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                copy_piece(stage + t * TILE_CODES + lane * 16, unit + codes[t], policy);
                copy_piece(stage + t * TILE_CODES + TILE_CODES / 2 + lane * 16, unit + codes[t] + CODE_BYTES / 2, policy);
            }
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                if (i * 32 + lane < TILES * TILE_PIECES)
                    copy_piece(stage + TILES * TILE_CODES + (i * 32 + lane) * 16, unit + pieces[i], policy);
        }
        copies_commit();
    }
};

// A thread has two neighbouring output features of each of two tokens. `stride` is even, so that pairs are aligned.
__device__ __forceinline__ void store_sums(const Problem& p, const float (&sums)[4], int row, int token) {
    if (row >= p.stride) return;
    const float low = p.bias && row < p.rows ? widen(p.bias[row]) : 0.f;
    const float high = p.bias && row + 1 < p.rows ? widen(p.bias[row + 1]) : 0.f;
#pragma unroll
    for (int e = 0; e < 2; e++)
        if (token + e < p.tokens)
            *reinterpret_cast<u32*>(p.out + (u64)(token + e) * p.stride + row) = round_pair(sums[e] + low, sums[2 + e] + high);
}

// Adds up what the warps, and the blocks of a cluster, found of each tile, in their order.
__device__ __forceinline__ void add_up(const Problem& p, const Block& block) {
    for (int i = block.rank * THREADS + threadIdx.x; i < BLOCK_TILES * 32; i += CLUSTER * THREADS) {
        const int tile = i / 32, lane = i % 32, token = lane % 4 * 2;
        if (token >= p.tokens) continue;
        const u32 from = block.ring + tile / TILES * WARP_BYTES + (tile % TILES * 32 + lane) * 16;
        float sums[4] = {};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++)
#pragma unroll
            for (int warp = 0; warp < DEPTH_WARPS; warp++) {
                const float4 found = load_shared_of(from + warp * ROW_WARPS * WARP_BYTES, rank);
                sums[0] += found.x, sums[1] += found.y, sums[2] += found.z, sums[3] += found.w;
            }
        store_sums(p, sums, (block.first_tile + tile) * 16 + lane / 4 * 2, token);
    }
}
