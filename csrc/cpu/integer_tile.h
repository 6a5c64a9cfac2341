// Weights times integer activations, summed exactly in 32 bits: a block of 16 output features by a tile of tokens.
//
// Weight codes are unsigned, activation codes signed. With byte dot products (VNNI) a word's four bytes are multiplied
// and added in one instruction. Without them bytes are multiplied as 16-bit pairs, which cannot saturate, and nibbles
// as byte pairs: 2 * 2 * 15 * 128 is less than 2**15.
#pragma once

#include "finish.h"
#include "inputs.h"

namespace fewbit {
namespace {

// Four byte codes to a word.
template <class Vector>
struct ByteProducts {
  static constexpr int kSlots = 4;
  static constexpr int kInputWords = Vector::kByteDotProducts ? 1 : 2;  // words of activations to a word of weights

  static void place(const int8_t* codes, int32_t* inputs, int64_t stride) {
    if constexpr (Vector::kByteDotProducts) {
      std::memcpy(inputs, codes, 4);
    } else {
      inputs[0] = pair(codes[0], codes[2]);
      inputs[stride] = pair(codes[1], codes[3]);
    }
  }

  static int32_t pair(int8_t low, int8_t high) {
    return static_cast<int32_t>(static_cast<uint16_t>(low) | static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
  }

  struct Decoded {
    typename Vector::Words even, odd;
  };

  static FEWBIT_INLINE Decoded decode(typename Vector::Words word) {
    if constexpr (Vector::kByteDotProducts) return {word, word};
    return {Vector::bits_of(word, Vector::broadcast_word(0x00ff00ff)), Vector::right16(word)};
  }

  static FEWBIT_INLINE typename Vector::Words add(typename Vector::Words sum, const Decoded& weight,
                                                  const int32_t* inputs, int64_t stride) {
    if constexpr (Vector::kByteDotProducts) {
      return Vector::add_byte_products(sum, weight.even, Vector::broadcast_word(inputs));
    } else {
      const auto even = Vector::pair_products(weight.even, Vector::broadcast_word(inputs));
      const auto odd = Vector::pair_products(weight.odd, Vector::broadcast_word(inputs + stride));
      return Vector::add_words(sum, Vector::add_words(even, odd));
    }
  }
};

// Eight nibble codes to a word.
template <class Vector>
struct NibbleProducts {
  static constexpr int kSlots = 8;
  static constexpr int kInputWords = 2;

  static void place(const int8_t* codes, int32_t* inputs, int64_t stride) {
    const int8_t even[4] = {codes[0], codes[2], codes[4], codes[6]}, odd[4] = {codes[1], codes[3], codes[5], codes[7]};
    std::memcpy(inputs, even, 4);
    std::memcpy(inputs + stride, odd, 4);
  }

  struct Decoded {
    typename Vector::Words even, odd;
  };

  static FEWBIT_INLINE Decoded decode(typename Vector::Words word) {
    const auto mask = Vector::broadcast_word(0x0f0f0f0f);
    return {Vector::bits_of(word, mask), Vector::bits_of(Vector::template right<4>(word), mask)};
  }

  static FEWBIT_INLINE typename Vector::Words add(typename Vector::Words sum, const Decoded& weight,
                                                  const int32_t* inputs, int64_t stride) {
    const auto even = Vector::broadcast_word(inputs), odd = Vector::broadcast_word(inputs + stride);
    if constexpr (Vector::kByteDotProducts) {
      return Vector::add_byte_products(Vector::add_byte_products(sum, weight.even, even), weight.odd, odd);
    } else {
      const auto halves = Vector::add_halves(Vector::byte_pair_products(weight.even, even),
                                             Vector::byte_pair_products(weight.odd, odd));
      return Vector::add_words(sum, Vector::pair_products(halves, Vector::broadcast_word(0x00010001)));
    }
  }
};

// totals[width][kBlockRows] of one block, without the tokens' scales. `inputs` is [words][kInputWords][width],
// `input_sums` [groups][width].
template <class Vector, class Products, int width>
void integer_tile(const Weight& weight, int64_t block, const int32_t* inputs, const int32_t* input_sums,
                  float* totals) {
  const int64_t words_per_group = weight.group_slots / Products::kSlots;
  const uint32_t* words = weight.words + block * weight.groups * words_per_group * kBlockRows;
  for (int i = 0; i < width * kParts<Vector>; ++i) Vector::store(totals + i * Vector::kLanes, Vector::zero());
  for (int64_t group = 0; group < weight.groups; ++group) {
    typename Vector::Words sums[width][kParts<Vector>];
    unroll<width>([&](auto token) FEWBIT_LAMBDA {
      unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA { sums[token][part] = Vector::zero_words(); });
    });
    for (int64_t i = 0; i < words_per_group; ++i) {
      if constexpr (width <= 2) __builtin_prefetch(words + kPrefetchWords);
      typename Products::Decoded decoded[kParts<Vector>];
      unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
        decoded[part] = Products::decode(Vector::load(words + part * Vector::kLanes));
      });
      unroll<width>([&](auto token) FEWBIT_LAMBDA {
        unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
          sums[token][part] = Products::add(sums[token][part], decoded[part], inputs + token, width);
        });
      });
      words += kBlockRows;
      inputs += Products::kInputWords * width;
    }
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto scale = scales_of<Vector>(weight, block, group, part);
      const auto zero = zeros_of<Vector>(weight, block, group, part);
      unroll<width>([&](auto token) FEWBIT_LAMBDA {
        const auto shift = Vector::multiply_words(zero, Vector::broadcast_word(input_sums + group * width + token));
        float* total = totals + token * kBlockRows + part * Vector::kLanes;
        const auto sum = Vector::to_floats(Vector::subtract_words(sums[token][part], shift));
        Vector::store(total, Vector::multiply_add(scale, sum, Vector::load_floats(total)));
      });
    });
  }
}

}  // namespace
}  // namespace fewbit
