// E2M1 as operands of 16 bits, exactly: a code's sign, exponent and mantissa become those of a float, which counts in
// 2**-126 (bf16) or 2**-14 (fp16); the scale that multiplies it makes up for that.
//
// Shifts to the left and multiplications run beside the masks, on units of their own.

constexpr float OPERANDS_COUNT = 1.f;    // what multiplies sums
constexpr bool FROM_E4M3 = GROUP == 16;  // scales, else E8M0
constexpr u32 SCALE_PLACES = FROM_E4M3 && !HALF ? 0x00100010 : 0x00800080;
constexpr u32 SCALE_BASE = FROM_E4M3 && !HALF ? 0x70007000 : 0;  // of the exponents

// Register i of a word of eight codes. Three registers lie in the word as they are, turned; the fourth in what they leave.
__device__ __forceinline__ u32 placed(u32 codes, int i) {
    u32 found;
    if (i == 3)
        found = __funnelshift_l(codes, codes, 14) & 0x81808180 | codes << 6 & 0x00400040;
    else
        found = (i == 2 ? __funnelshift_l(codes, codes, 10) : codes << 4 * i) & 0x81C081C0;
    return HALF ? found & 0x80008000 | (found & 0x01C001C0) << 3 : found;
}

// A scale of the two output features and two groups that a word has, in both halves: five bits of E4M3's are its exponent and
// three its mantissa, E8M0's are the exponent.
__device__ __forceinline__ u32 scale_of(u32 word, int feature, int group) {
    return byte_of(word, 2 * feature + group % 2) * SCALE_PLACES + SCALE_BASE;
}

// Eight codes -> the fragment of 16 input features: rows by turns, input features 0 to 7, then 8 to 15.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32 scales, int group, u32) {
    const u32 scale[2] = {scale_of(scales, 0, group), scale_of(scales, 1, group)};
#pragma unroll
    for (int i = 0; i < 4; i++) fragment[i] = multiply_pair(placed(codes[0], i), scale[i & 1]);
}
