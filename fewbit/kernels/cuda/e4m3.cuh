// E4M3 as operands of 16 bits, exactly: a code's sign, exponent and mantissa become those of a float, which counts in 2**-120
// (bf16) or 2**-8 (fp16), and is multiplied back.

constexpr float OPERANDS_COUNT = 1.f;  // what multiplies sums
constexpr int SHIFT = HALF ? 1 : 4;    // of exponents and mantissas in the upper byte of a half
constexpr u32 MAGNITUDES = HALF ? 0x3F803F80 : 0x07F007F0;
constexpr u32 COUNT = HALF ? 0x5C005C00 : 0x7B807B80;

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32, int, u32) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = codes[i / 2], sign = i & 1 ? word : word << 8;
        const u32 magnitude = i & 1 ? word >> SHIFT : word << (8 - SHIFT);
        fragment[i] = multiply_pair(sign & 0x80008000 | magnitude & MAGNITUDES, COUNT);
    }
}
