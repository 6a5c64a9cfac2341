// y [M, N] = x [M, K] @ W [N, K]^T for 8-bit codes on both sides on Hopper: what a block takes, and where it lies.
//
// Tokens are the left operand of the tensor cores and output features the right one, both from shared memory, where the copy
// engine puts whole lines of 128 bytes of the stored rows. A block takes TOKENS by ROWS output features, so that a
// layer can be cut into as many blocks as there are multiprocessors. Up to 64 tokens are rows of one instruction: its
// others read whatever follows, and their sums are not stored. Then the warpgroups divide each stage's input features.
//
// Compile-time: TOKENS (8, 16, 32, or 64 times warpgroups that divide them), ROWS (a multiple of 8 or, of more than 32,
// of 16, up to 256), LINES (of a row in a stage), STAGES, WARPGROUPS, CLUSTER (blocks that share tokens, or output features
// where SHARES_WEIGHT), WHOLE (no range ends inside a tile), INTEGER
// (int8, else E4M3), HALF, ZEROS (whether tokens have
// zero points), and REGISTERS and FEEDER_REGISTERS of a thread, 0 where all have as many.

constexpr int LINE = 128;
constexpr u32 SLICES_OF_LINE = LINE / 32;
constexpr int SPLIT = TOKENS <= 64 ? WARPGROUPS : 1;  // warpgroups that have parts of the same sums
constexpr u32 SLICES = LINES * SLICES_OF_LINE / SPLIT;
constexpr int X_LINE = TOKENS * LINE, W_LINE = ROWS * LINE;
constexpr int X_BYTES = LINES * X_LINE;
constexpr int STAGE_BYTES = X_BYTES + LINES * W_LINE;
constexpr int TILES = 1, SUMS = ROWS / 2;
constexpr int CONSUMERS = WARPGROUPS * 128, THREADS = CONSUMERS / SPLIT;

constexpr int FEEDERS = REGISTERS ? 128 : 32;  // threads of which one feeds the others

#if INTEGER
typedef int Sum;
#else
typedef float Sum;
#endif

struct Problem {
    u16* out;                          // [M, stride], of which N columns count
    const float* row_scale;            // [N]
    const float* weight_sums;          // [N] where tokens have zero points, before `row_scale`
    const unsigned char* group_scale;  // [groups, N] where sums of groups are scaled
    const u16* bias;                   // [N] or null
    const float* x_scale;              // [M] or []
    const float* x_zero;               // [M] or []
    Sum* partial;                      // [blocks, sums of a block]
    u32* flags;                        // as many as blocks, zero between launches
    int tokens, rows, stride, depths, token_tiles, tiles, parts, scale_stride, zero_stride;
};

// A cluster's walk: through its range of the work, or through whole tiles that lie as far apart as there are clusters, so
// that at any time all of them read much the same.
struct Walk {
    int index, clusters, first, end;  // in steps
    __device__ __forceinline__ Walk(const Problem& p) {
        clusters = gridDim.x / CLUSTER, index = clusters - 1 - blockIdx.x / CLUSTER;
        const Range range(index, clusters, p.tiles * p.depths);
        first = WHOLE ? 0 : range.first;
        end = WHOLE ? (p.tiles - index + clusters - 1) / clusters * p.depths : range.end;
    }
    __device__ __forceinline__ int tile(int count) const { return WHOLE ? count * clusters + index : count; }
};

// Where a tile lies. Up to TOGETHER tiles of tokens are near in time, so that both sides come from the cache.
constexpr int TOGETHER = 16;

struct Place {
    int token, row;
    __device__ __forceinline__ Place(const Problem& p, int tile, int rank) {
        const int together = TOGETHER * (p.tiles / p.token_tiles), before = tile / together * TOGETHER;
        const int height = min(p.token_tiles - before, TOGETHER), inside = tile % together;
        token = before + inside % height;
        row = inside / height;
        if (SHARES_WEIGHT)
            token = token * CLUSTER + rank;
        else
            row = row * CLUSTER + rank;
        token *= TOKENS, row *= ROWS;
        // A block that reaches beyond the weight would read it several times as slowly: it does a part of another's once more.
        if (WHOLE && p.rows % 8 == 0 && p.rows >= ROWS) row = min(row, p.rows - ROWS);
    }
};

// The step that is fetched next.
struct Cursor {
    int count, depth;
    Place place;
    __device__ __forceinline__ Cursor(const Problem& p, const Walk& walk, int rank)
        : count(walk.first / p.depths), depth(walk.first % p.depths), place(p, walk.tile(count), rank) {}
    __device__ __forceinline__ void next(const Problem& p, const Walk& walk, int rank) {
        if (++depth < p.depths) return;
        depth = 0;
        place = Place(p, walk.tile(++count), rank);
    }
};

// A box of a stage; every block of a cluster fetches its part of what they share for all.
template <int COUNT, bool SHARED>
__device__ __forceinline__ void copy_part(const TensorMap* map, u32 to, int row, int line, u32 rank, u32 barrier,
                                          u64 policy) {
    if (CLUSTER == 1 || !SHARED) {
        copy_lines(to, map, row, line, barrier, policy);
        return;
    }
    constexpr int PART = COUNT / CLUSTER;
#pragma unroll
    for (int i = 0; i < LINES; i++)  // a box of one line, as lines of parts do not follow one another
        copy_lines_to(to + (i * COUNT + rank * PART) * LINE, map, row + rank * PART, line + i, barrier, policy,
                      (1 << CLUSTER) - 1);
}

struct Fetch {
    const TensorMap *x_map, *weight_map;
    const Problem& p;
    const Walk& walk;
    u32 rank;
    u64 of_weights, of_tokens;
    Cursor at_weights, at_tokens;

    __device__ __forceinline__ void weights(int, u32 to, u32 barrier) {
        barrier_expect(barrier, STAGE_BYTES);
        copy_part<ROWS, SHARES_WEIGHT>(weight_map, to + X_BYTES, at_weights.place.row, at_weights.depth * LINES, rank,
                                       barrier, of_weights);
        at_weights.next(p, walk, rank);
    }

    __device__ __forceinline__ void tokens(int, u32 to, u32 barrier) {
        copy_part<TOKENS, !SHARES_WEIGHT>(x_map, to, at_tokens.place.token, at_tokens.depth * LINES, rank, barrier, of_tokens);
        at_tokens.next(p, walk, rank);
    }
};
