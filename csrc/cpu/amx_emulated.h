// The operations of `amx.h` in plain C++, for tests on CPUs without AMX: everything but the instructions themselves is
// what runs on a CPU that has them.
#pragma once

#include <cstring>

#include "amx.h"

namespace fewbit {
namespace {

struct AmxEmulated {
  static void configure(const TileShapes& shapes) {
    for (int i = 0; i < 16; ++i) {
      require(shapes.rows[i] <= (i < 8 ? kTileRows : 0) && shapes.row_bytes[i] <= kTileRowBytes);
      require((shapes.rows[i] == 0) == (shapes.row_bytes[i] == 0));
    }
    registers().shapes = shapes;
  }
  static void release() { registers().shapes = TileShapes{}; }

  template <int tile>
  static void zero() {
    std::memset(registers().words[tile], 0, sizeof registers().words[tile]);
  }
  template <int tile>
  static void load(const void* from, int64_t stride) {
    Registers& all = registers();
    zero<tile>();
    for (int row = 0; row < all.shapes.rows[tile]; ++row) {
      std::memcpy(all.words[tile][row], static_cast<const char*>(from) + row * stride, all.shapes.row_bytes[tile]);
    }
  }
  template <int tile>
  static void store(void* to, int64_t stride) {
    const Registers& all = registers();
    for (int row = 0; row < all.shapes.rows[tile]; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, all.words[tile][row], all.shapes.row_bytes[tile]);
    }
  }

  template <int sums, int inputs, int weights>
  static void add_signed() {
    add_bytes<sums, inputs, weights, int8_t>();
  }
  template <int sums, int inputs, int weights>
  static void add_unsigned() {
    add_bytes<sums, inputs, weights, uint8_t>();
  }
  template <int sums, int inputs, int weights>
  static void add_bf16() {
    float added[kTileRows][kTileRows] = {}, before[kTileRows][kTileRows];
    each_word<sums, inputs, weights>([&](int m, int n, uint32_t input, uint32_t weight) __attribute__((always_inline)) {
      const float low = number(input << 16) * number(weight << 16);
      added[m][n] = (added[m][n] + low) + number(input & 0xffff0000) * number(weight & 0xffff0000);
    });
    std::memcpy(before, registers().words[sums], sizeof before);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < kTileRows; ++n) before[m][n] += added[m][n];
    }
    std::memcpy(registers().words[sums], before, sizeof before);
  }

 private:
  struct Registers {
    TileShapes shapes;
    uint32_t words[8][kTileRows][kTileRowBytes / 4];
  };

  static Registers& registers() {
    static thread_local Registers all;
    return all;
  }

  // What the instructions raise as an exception of the CPU.
  static void require(bool lawful) {
    if (!lawful) __builtin_trap();
  }

  static float number(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  template <int sums, int inputs, int weights, class Weight>
  static void add_bytes() {
    Registers& all = registers();
    each_word<sums, inputs, weights>([&](int m, int n, uint32_t input, uint32_t weight) __attribute__((always_inline)) {
      int32_t added = 0;
      for (int i = 0; i < 32; i += 8) {
        added += static_cast<int8_t>(input >> i) * static_cast<int32_t>(static_cast<Weight>(weight >> i));
      }
      all.words[sums][m][n] += static_cast<uint32_t>(added);
    });
  }

  // visit(m, n, word k of input row m, word n of weight row k), as the shapes of the registers say.
  template <int sums, int inputs, int weights, class Visit>
  __attribute__((no_sanitize("address"))) static void each_word(Visit&& visit) {
    const Registers& all = registers();
    const TileShapes& shapes = all.shapes;
    require(shapes.rows[sums] > 0 && shapes.rows[sums] == shapes.rows[inputs]);
    require(shapes.row_bytes[sums] == shapes.row_bytes[weights] && shapes.row_bytes[inputs] % 4 == 0);
    require(shapes.row_bytes[inputs] / 4 == shapes.rows[weights]);
    const int words = shapes.row_bytes[inputs] / 4, columns = shapes.row_bytes[sums] / 4;
    for (int m = 0; m < all.shapes.rows[sums]; ++m) {
      for (int k = 0; k < words; ++k) {
        const uint32_t input = all.words[inputs][m][k];
        for (int n = 0; n < columns; ++n) visit(m, n, input, all.words[weights][k][n]);
      }
    }
  }
};

}  // namespace
}  // namespace fewbit
