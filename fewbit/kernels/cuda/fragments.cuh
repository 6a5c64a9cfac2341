// How a unit of 64 output features by 128 input features is stored; `fragment_layout.py` tells of the layout.
//
// Compile-time: CODE_BITS (4 or 8), GROUP (input features under a scale: 16, 32, 64, 128), SCALE_WIDTH (bytes of a stored scale,
// or 0), HAS_ZERO, HALF (fp16, else bf16), ROW_SCALED (a float32 scale for each output feature multiplies the result),
// OPERAND_BYTES (of a decoded number: 2, or 1 for E4M3).

constexpr int DEPTH = 128;
constexpr int SCALE_BYTES = 64 * SCALE_WIDTH * (DEPTH / GROUP);
constexpr int SCALE_WORDS = SCALE_BYTES / 128;  // of two output features
constexpr int CODE_BYTES = 8 * DEPTH * CODE_BITS;
constexpr int CODE_LOADS = CODE_BYTES / 2048;  // of 16 bytes for each thread of a warpgroup
constexpr int PRODUCTS = DEPTH * OPERAND_BYTES / 32;
constexpr int PRODUCT_WORDS = 4 * CODE_LOADS / PRODUCTS;  // of codes
constexpr int UNIT_BYTES = CODE_BYTES + SCALE_BYTES * (1 + HAS_ZERO);

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

__device__ __forceinline__ u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }
__device__ __forceinline__ u32 byte_of(u32 word, int place) { return __byte_perm(word, 0, 0x4440 + place); }
