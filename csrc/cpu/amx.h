// The matrix registers of AMX: eight tiles of 16 rows of 64 bytes. They hold 16 tokens' inputs, a panel's weights or the
// sums of both, and one instruction multiplies a whole tile by another.
//
// The instructions are written out, because the compiler's own functions take the number of a register only as a literal
// and do not all say that they read memory.
#pragma once

#include <cstdint>

namespace fewbit {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int64_t kTileWords = kTileRows * kTileRowBytes / 4;

// How many rows of how many bytes each register has, as LDTILECFG reads it.
struct TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

namespace {

#ifdef __AMX_TILE__
struct Amx {
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  // Rows lie `stride` bytes apart.
  template <int tile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
  }

  // sums[m][n] += products of what row m of the inputs and column n of the weights hold, a word of each at a time: four
  // signed bytes by four signed or unsigned ones, exactly, or two bf16 numbers.
  template <int sums, int inputs, int weights>
  static void add_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
  }
  template <int sums, int inputs, int weights>
  static void add_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
  }
  // Subnormal numbers count as zero.
  template <int sums, int inputs, int weights>
  static void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(inputs), "i"(weights));
  }
};
#endif

}  // namespace
}  // namespace fewbit
