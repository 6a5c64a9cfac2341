// A weight [N, K] in bf16 or fp16 from its fragments: a block for every unit, put in order in shared memory.

extern "C" __global__ void __launch_bounds__(256) decode_weight(const unsigned char* weight, u16* out, int rows, int columns,
                                                                int depths) {
    constexpr int WIDTH = DEPTH / 2 + 4;  // 32-bit words of a row, and four that keep rows off each other's banks
    __shared__ __align__(16) u32 numbers[64 * WIDTH];
    const unsigned char* unit = weight + (u64)blockIdx.x * UNIT_BYTES;
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int pair = warp * 8 + lane / 4;
    let_next_launch();
    const uint4 found = reinterpret_cast<const uint4*>(unit)[threadIdx.x];
    const u32 codes[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int group = (half * 64 + i * 16) / GROUP;
        const u32* scales = reinterpret_cast<const u32*>(unit + CODE_BYTES + group * 128) + pair;
        u32 fragment[4];
        decode(fragment, codes[i], scales[0], HAS_ZERO ? scales[SCALE_BYTES / 4] : 0);
#pragma unroll
        for (int part = 0; part < 4; part++)
            numbers[(2 * pair + (part & 1)) * WIDTH + half * 32 + i * 8 + part / 2 * 4 + lane % 4] = fragment[part];
    }
    wait_for_previous();
    __syncthreads();
    const int first_row = blockIdx.x / depths * 64, first_column = blockIdx.x % depths * DEPTH;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = i * 16 + threadIdx.x / 16, column = threadIdx.x % 16 * 8;
        if (first_row + row < rows && first_column + column < columns)
            *reinterpret_cast<uint4*>(out + (u64)(first_row + row) * columns + first_column + column) =
                *reinterpret_cast<const uint4*>(&numbers[row * WIDTH + column / 2]);
    }
}
