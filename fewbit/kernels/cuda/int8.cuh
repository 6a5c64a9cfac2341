// Integers of 8 bits as operands of 16 bits: bytes in two's complement.

constexpr float OPERANDS_COUNT = 1.f;  // what multiplies sums

// An integer of 7 bits in the low end of a float's mantissa is that integer plus MAGIC, the sign's bit is 128 more.
constexpr u32 MAGIC = HALF ? 0x64006400 : 0x43004300;

// One instruction for (word & mask) | MAGIC.
__device__ __forceinline__ u32 with_magic(u32 word, u32 mask) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(MAGIC));
    return found;
}

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32 scales, int, u32) {
    const u32 scale[2] = {both_low(scales), both_high(scales)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = codes[i / 2] >> 8 * (i & 1);
        const u32 number = subtract_pair(with_magic(word, 0x007F007F), with_magic(word, 0x00800080));
        fragment[i] = SCALE_WIDTH ? multiply_pair(number, scale[i & 1]) : number;
    }
}
