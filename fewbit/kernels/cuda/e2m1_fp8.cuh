// E2M1 as operands in E4M3, exactly: the lower three bits of a code choose a byte of a table, the fourth is its sign. Operands
// count in 2**-6 times what their output feature counts in.

constexpr float OPERANDS_COUNT = 1.f;
constexpr u32 LOW_CODES = 0x6C686000;   // 0, 0.5, 1, 1.5
constexpr u32 HIGH_CODES = 0x7C787470;  // 2, 3, 4, 6

// The table under a scale of 2**-n that operands take in: `step` is 8 n, n up to 11. Zero stays zero.
struct Table {
    u32 low, high;
    __device__ __forceinline__ Table(u32 step) : low(LOW_CODES - step * 0x01010100), high(HIGH_CODES - step * 0x01010101) {}
};

// Eight codes -> four of either output feature.
__device__ __forceinline__ void look_up(u32* fragment, u32 codes, const Table& first, const Table& second) {
    const u32 chosen = codes & 0x77777777;
    fragment[0] = __byte_perm(first.low, first.high, chosen) | codes & 0x80808080;
    fragment[1] = __byte_perm(second.low, second.high, chosen >> 16) + (codes & 0x08080808) * 16;
}

// The fragment of a group of 32 input features: a word of steps has those of two groups, by turns, for either output feature.
// Scales of two bytes stay outside.
__device__ __forceinline__ void decode(u32 (&fragment)[4], const u32* codes, u32 steps, int group, u32) {
    if (SCALE_WIDTH == 2) steps = 0;
    const Table first(byte_of(steps, group % 2)), second(byte_of(steps, 2 + group % 2));
    look_up(&fragment[0], codes[0], first, second);
    look_up(&fragment[2], codes[1], first, second);
}
