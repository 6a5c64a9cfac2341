// E2M1 as operands of 16 bits, exactly: a code's sign, exponent and mantissa become those of a float, which counts in
// 2**-126 (bf16) or 2**-14 (fp16); the scale that multiplies it makes up for that.

constexpr float OPERANDS_COUNT = 1.f;    // what multiplies sums
constexpr bool FROM_E4M3 = GROUP == 16;  // scales, else E8M0
constexpr int SCALE_SHIFT = FROM_E4M3 && !HALF ? 4 : 7;
constexpr u32 SCALE_MASK = 0x00FF00FF << SCALE_SHIFT;
constexpr u32 SCALE_BASE = FROM_E4M3 && !HALF ? 0x70007000 : 0;  // of the exponents

__device__ __forceinline__ u32 turned(u32 word, int distance) { return __funnelshift_l(word, word, distance); }

// Register i of a word of eight codes. Three registers lie in the word as they are, turned; the fourth in what they leave.
__device__ __forceinline__ u32 placed(u32 codes, int i) {
    const u32 found = i == 3 ? turned(codes, 14) & 0x81808180 | turned(codes, 6) & 0x00400040
                             : turned(codes, i == 2 ? 10 : 4 * i) & 0x81C081C0;
    return HALF ? found & 0x80008000 | (found & 0x01C001C0) << 3 : found;
}

// The scales of two output features in a group: a word holds those of an even group in its even bytes and of the next group
// in its odd ones. Eight bits of E4M3's scales are five of the exponent and three of the mantissa, of E8M0's the exponent.
__device__ __forceinline__ u32 scale_pair(u32 word, int group) {
    return masked_with(group & 1 ? word >> (8 - SCALE_SHIFT) : word << SCALE_SHIFT, SCALE_MASK, SCALE_BASE);
}

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], u32 codes, u32 scales, u32) {
    const u32 scale[2] = {both_low(scales), both_high(scales)};
#pragma unroll
    for (int i = 0; i < 4; i++) fragment[i] = multiply_pair(placed(codes, i), scale[i & 1]);
}
