// y [M, N] = x [M, K] @ W [N, K]^T for weights of 4 or 8 bits on Hopper: what a block takes, and where it lies.
//
// Weights are the left operand of the tensor cores, decoded in registers, tokens the right one, from shared memory. A block
// takes WARPGROUPS * TILES * 64 output features by TOKENS tokens, a stage 128 input features. `ring.cuh` and `sums.cuh`
// tell of how the work is cut.
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
typedef float Sum;

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

// Weights and tokens of a stage.
struct Fetch {
    const TensorMap* x_map;
    const Problem& p;
    u32 rank;
    u64 policy;

    __device__ __forceinline__ void weights(int step, u32 to, u32 barrier) const {
        const Place place(p, step, rank);
        barrier_expect(barrier, X_BYTES + W_BYTES);
#pragma unroll
        for (int i = 0; i < UNITS; i++) {
            const u64 unit = min(place.unit + i, p.units - 1);  // a block may be taller than what is left of the weight
            copy_bytes(to + X_BYTES + i * UNIT_BYTES, p.weight + (unit * p.depths + place.depth) * UNIT_BYTES, UNIT_BYTES,
                       barrier, policy);
        }
    }

    // Every block of a cluster fetches its part of the tokens for all.
    __device__ __forceinline__ void tokens(int step, u32 to, u32 barrier) const {
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
};
