// A weight [N, K] in bf16, fp16 or E4M3 from its fragments: a block for every unit, put in order in shared memory.
//
// Compile-time: what `fragments.cuh` needs.

#if OPERAND_BYTES == 2
typedef u16 Number;
#else
typedef unsigned char Number;
#endif

// Where scales of output features are no part of fragments, numbers of 16 bits are rounded once more.
__device__ __forceinline__ u32 with_row_scale(u32 pair, float scale) {
    return round_pair(widen(pair & 0xFFFF) * scale, widen(pair >> 16) * scale);
}

extern "C" __global__ void __launch_bounds__(256) decode_weight(const unsigned char* weight, Number* out, int rows, int columns,
                                                                int depths, const float* row_scale) {
    constexpr int WORDS = DEPTH * OPERAND_BYTES / 4;  // of a row, and four that keep rows off each other's banks
    constexpr int WIDTH = WORDS + 4;
    constexpr int TOGETHER = 16 / OPERAND_BYTES;
    constexpr int FEATURES = DEPTH / PRODUCTS;
    __shared__ __align__(16) u32 numbers[64 * WIDTH];
    const unsigned char* unit = weight + (u64)blockIdx.x * UNIT_BYTES;
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int pair = warp * 8 + lane / 4;
    let_next_launch();
#pragma unroll
    for (int load = 0; load < CODE_LOADS / 2; load++) {
        const int part = load * 2 + half, first = part * (PRODUCTS / CODE_LOADS);
        const uint4 found = reinterpret_cast<const uint4*>(unit)[load * 256 + threadIdx.x];
        const u32 codes[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int i = 0; i < PRODUCTS / CODE_LOADS; i++) {
            const int group = (first + i) * FEATURES / GROUP * SCALE_WIDTH / 2;
            const u32* scales = reinterpret_cast<const u32*>(unit + CODE_BYTES + group * 128) + pair;
            u32 fragment[4];
            decode(fragment, codes + i * PRODUCT_WORDS, SCALE_WIDTH ? scales[0] : 0, i * FEATURES / GROUP,
                   HAS_ZERO ? scales[SCALE_BYTES / 4] : 0);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = 2 * pair + (j & 1);
                if (ROW_SCALED && OPERAND_BYTES == 2)
                    fragment[j] = with_row_scale(fragment[j], row_scale[blockIdx.x / depths * 64 + row]);
                numbers[row * WIDTH + (first + i) * 8 + j / 2 * 4 + lane % 4] = fragment[j];
            }
        }
    }
    wait_for_previous();
    __syncthreads();
    const int first_row = blockIdx.x / depths * 64, first_column = blockIdx.x % depths * DEPTH;
#pragma unroll
    for (int i = 0; i < 64 * WORDS / 4 / 256; i++) {
        const int row = i * (256 / (DEPTH / TOGETHER)) + threadIdx.x / (DEPTH / TOGETHER);
        const int column = threadIdx.x % (DEPTH / TOGETHER) * TOGETHER;
        if (first_row + row < rows && first_column + column < columns)
            *reinterpret_cast<uint4*>(out + (u64)(first_row + row) * columns + first_column + column) =
                *reinterpret_cast<const uint4*>(&numbers[row * WIDTH + column * OPERAND_BYTES / 4]);
    }
}
