// How a unit of 64 output features by 128 input features is stored and decoded; `fragment_layout.py` tells of the layout.
//
// Compile-time: GROUP (input features under a scale: 32, 64, 128), HAS_ZERO, HALF (fp16, else bf16).

constexpr int DEPTH = 128;
constexpr int SCALE_BYTES = 128 * (DEPTH / GROUP);
constexpr int CODE_BYTES = 64 * DEPTH / 2;
constexpr int UNIT_BYTES = CODE_BYTES + SCALE_BYTES * (1 + HAS_ZERO);

// An integer of 4 bits in the low end of a float's mantissa is that integer plus MAGIC.
constexpr u32 MAGIC = HALF ? 0x64006400 : 0x43004300;
constexpr u32 OFFSET = MAGIC + 0x00080008;

__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
    u32 found;
    asm("sub.rn." FLOAT "x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}

__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 found;
    asm("mul.rn." FLOAT "x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}

// Four bits of each half of a word become floats, counted from MAGIC: one instruction for (word & mask) | MAGIC.
__device__ __forceinline__ u32 to_floats(u32 word) {
    u32 found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(0x000F000F), "r"(MAGIC));
    return found;
}

__device__ __forceinline__ u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], u32 codes, u32 scales, u32 zeros) {
    const u32 scale[2] = {both_low(scales), both_high(scales)};
    const u32 zero[2] = {HAS_ZERO ? both_low(zeros) : OFFSET, HAS_ZERO ? both_high(zeros) : OFFSET};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 raw = to_floats(codes >> 4 * i);
        fragment[i] = multiply_pair(subtract_pair(raw, zero[i & 1]), scale[i & 1]);
    }
}
