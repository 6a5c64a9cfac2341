// Integers of up to 4 bits as operands of 16 bits.

constexpr float OPERANDS_COUNT = 1.f;  // what multiplies sums

// An integer of 4 bits in the low end of a float's mantissa is that integer plus MAGIC.
constexpr u32 MAGIC = HALF ? 0x64006400 : 0x43004300;
constexpr u32 OFFSET = MAGIC + 0x00080008;

// Four bits of each half of a word become floats, counted from MAGIC: one instruction for (word & mask) | MAGIC.
__device__ __forceinline__ u32 to_floats(u32 word) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(0x000F000F), "r"(MAGIC));
    return found;
}

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32 scales, int, u32 zeros) {
    const u32 scale[2] = {both_low(scales), both_high(scales)};
    const u32 zero[2] = {HAS_ZERO ? both_low(zeros) : OFFSET, HAS_ZERO ? both_high(zeros) : OFFSET};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 raw = to_floats(codes[0] >> 4 * i);
        fragment[i] = multiply_pair(subtract_pair(raw, zero[i & 1]), scale[i & 1]);
    }
}
