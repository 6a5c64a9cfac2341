// Integers of up to 4 bits as operands in E4M3: a number below 16 in the bits of E4M3 is that many times 2**-9.

constexpr float OPERANDS_COUNT = 512.f;  // what multiplies sums

// A code is a sign over the magnitude, less one where the sign is set, so that -8 has a code. Eight codes -> low, then high
// nibbles.
__device__ __forceinline__ void decode_e4m3(u32* fragment, u32 codes) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 nibbles = codes >> 4 * i;
        fragment[i] = (nibbles & 0x07070707) + (nibbles >> 3 & 0x01010101) * 0x81;
    }
}

// The fragment of 32 input features, before scales.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32, int, u32) {
    decode_e4m3(&fragment[0], codes[0]);
    decode_e4m3(&fragment[2], codes[1]);
}
