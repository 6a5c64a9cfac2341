// Weights in the order in which AMX multiplies them: a panel is [rows][kBlockRows] words, a row holding the next four
// bytes or two bf16 numbers of each output feature. So a word of byte codes is a row of a panel as it lies.
//
// Each kind of codes has kInputBytes of an input slot, kSlots of them to a word of codes, which is kWordRows of a panel,
// decode(weight, block, group, words, panel) for a stretch of the group's words, and add<Tiles, sums, inputs, weights>().
#pragma once

#include "panel.h"

namespace fewbit {
namespace {

template <int kSlots>
const uint32_t* words_of(const Weight& weight, int64_t block, int64_t group, int64_t first) {
  return weight.words + ((block * weight.slots() + group * weight.group_slots) / kSlots + first) * kBlockRows;
}

// Bytes under bytes: unsigned, their zero points subtracted from the sums.
template <class Vector>
struct AmxBytes {
  static constexpr int kInputBytes = 1, kSlots = 4, kWordRows = 1;
  static constexpr bool kShiftsSums = true;

  explicit AmxBytes(const Weight&) {}

  static void order(int8_t*, int64_t) {}

  void decode(const Weight& weight, int64_t block, int64_t group, Range words, uint32_t* panel) const {
    std::memcpy(panel, words_of<kSlots>(weight, block, group, words.begin),
                static_cast<size_t>((words.end - words.begin) * kBlockRows) * 4);
  }

  template <class Tiles, int sums, int inputs, int weights>
  static FEWBIT_INLINE void add() {
    Tiles::template add_unsigned<sums, inputs, weights>();
  }
};

// Nibbles under bytes, less their zero points. The even ones of a word come first, then the odd ones.
template <class Vector>
struct AmxNibbles {
  static constexpr int kInputBytes = 1, kSlots = 8, kWordRows = 2;
  static constexpr bool kShiftsSums = false;

  explicit AmxNibbles(const Weight&) {}

  // Whole words of inputs, from 0 1 2 3 4 5 6 7 to 0 2 4 6 1 3 5 7.
  static void order(int8_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; i += kSlots) {
      uint64_t word;
      std::memcpy(&word, slots + i, sizeof word);
      uint64_t moved = (word ^ (word >> 8)) & 0x0000ff000000ff00;
      word ^= moved ^ (moved << 8);
      moved = (word ^ (word >> 16)) & 0x00000000ffff0000;
      word ^= moved ^ (moved << 16);
      std::memcpy(slots + i, &word, sizeof word);
    }
  }

  void decode(const Weight& weight, int64_t block, int64_t group, Range words, uint32_t* panel) const {
    const auto mask = Vector::broadcast_word(0x0f0f0f0f), four = Vector::broadcast_word(0x01010101);
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto zero = Vector::multiply_words(zeros_of<Vector>(weight, block, group, part), four);
      const uint32_t* from = words_of<kSlots>(weight, block, group, words.begin) + part * Vector::kLanes;
      uint32_t* to = panel + part * Vector::kLanes;
      for (int64_t i = words.begin; i < words.end; ++i, from += kBlockRows, to += 2 * kBlockRows) {
        const auto word = Vector::load(from);
        const auto odd = Vector::bits_of(Vector::template right<4>(word), mask);
        Vector::store_words(to, Vector::subtract_bytes(Vector::bits_of(word, mask), zero));
        Vector::store_words(to + kBlockRows, Vector::subtract_bytes(odd, zero));
      }
    });
  }

  template <class Tiles, int sums, int inputs, int weights>
  static FEWBIT_INLINE void add() {
    Tiles::template add_signed<sums, inputs, weights>();
  }
};

// Any codes under bf16, less their zero points: exact, see `bf16_panel`. Narrow ones are looked up.
template <class Vector, class Fields>
struct AmxBf16 {
  static constexpr int kInputBytes = 2, kSlots = Fields::kSlots, kWordRows = kSlots / 2;
  static constexpr bool kShiftsSums = false;
  static constexpr int kBits = 32 / kSlots;
  static constexpr bool kLooksUp = kBits <= 4;

  // bf16 numbers by the low five bits of a code; less a zero point of its own, of a code's difference from it.
  alignas(64) uint16_t table[32];

  explicit AmxBf16(const Weight& weight) {
    if constexpr (kLooksUp) {
      for (int i = 0; i < 32; ++i) {
        const float number = weight.zeros ? static_cast<float>(i < 16 ? i : i - 32)
                                          : number_of(i % (1 << kBits)) - static_cast<float>(weight.constant_zero);
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        table[i] = static_cast<uint16_t>(bits >> 16);
      }
    }
  }

  void decode(const Weight& weight, int64_t block, int64_t group, Range words, uint32_t* panel) const {
    if constexpr (!kLooksUp) {
      return bf16_panel<Vector, Fields>(weight, block, group, {words.begin * kSlots, words.end * kSlots}, panel);
    } else {
      const uint32_t* from = words_of<kSlots>(weight, block, group, words.begin);
      unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
        const uint32_t* codes = from + part * Vector::kLanes;
        uint32_t* to = panel + part * Vector::kLanes;
        if (!weight.zeros) return look_up(codes, words, to, [](auto pair) FEWBIT_LAMBDA { return pair; });
        const auto mask = Vector::broadcast_word(((1 << kBits) - 1) * 0x10001);
        const auto zero = zeros_of<Vector>(weight, block, group, part);
        const auto zeros = Vector::add_words(zero, Vector::template left<16>(zero));
        look_up(codes, words, to, [&](auto pair) FEWBIT_LAMBDA {
          return Vector::subtract_halves(Vector::bits_of(pair, mask), zeros);
        });
      });
    }
  }

  template <class Tiles, int sums, int inputs, int weights>
  static FEWBIT_INLINE void add() {
    Tiles::template add_bf16<sums, inputs, weights>();
  }

 private:
  static float number_of(int code) {
    float lanes[Vector::kLanes];
    Vector::store(lanes, Fields::template decode<0>(Vector::broadcast_word(code)));
    return lanes[0] * Fields::input_factor(0);
  }

  template <int n>
  static FEWBIT_INLINE typename Vector::Words moved_up(typename Vector::Words word) {
    if constexpr (n >= 0) return Vector::template left<n>(word);
    return Vector::template right<n >= 0 ? 0 : -n>(word);
  }

  // index_of(two codes, with what lies above them) gives their places in the table.
  template <class IndexOf>
  FEWBIT_INLINE void look_up(const uint32_t* from, Range words, uint32_t* to, IndexOf&& index_of) const {
    for (int64_t i = words.begin; i < words.end; ++i, from += kBlockRows, to += kWordRows * kBlockRows) {
      const auto word = Vector::load(from);
      unroll<kWordRows>([&](auto row) FEWBIT_LAMBDA {
        constexpr int kBit = 2 * kBits * decltype(row)::value;
        const auto pair = Vector::join_halves(Vector::template right<kBit>(word), moved_up<16 - kBits - kBit>(word));
        Vector::store_words(to + row * kBlockRows, Vector::look_up_halves(table, index_of(pair)));
      });
    }
  }
};

}  // namespace
}  // namespace fewbit
