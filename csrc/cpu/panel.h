// Many tokens: a stretch of a block's weights is decoded once, into a panel that stays in the first-level cache, and the
// panel then multiplies one tile of tokens after the other.
//
// A panel is [steps][kBlockRows] words of 32 bits. A step is one input feature in float32, or two in bf16 or as 16-bit
// integers. The inputs of a token are its own steps one after another: activations keep their order.
#pragma once

#include "decode.h"
#include "finish.h"

namespace fewbit {
namespace {

// A panel of so many steps takes half of a first-level cache, and so many panels a part of the second.
constexpr int64_t kPanelSteps = 256;
constexpr int64_t kPanelBlocks = 4;

template <class Vector>
struct FloatSteps {
  using Sum = typename Vector::Floats;
  static FEWBIT_INLINE Sum none() { return Vector::zero(); }
  static FEWBIT_INLINE Sum load(const uint32_t* from) {
    return Vector::load_floats(reinterpret_cast<const float*>(from));
  }
  static FEWBIT_INLINE void store(uint32_t* to, Sum sum) { Vector::store(reinterpret_cast<float*>(to), sum); }
  static FEWBIT_INLINE Sum broadcast(const uint32_t* from) {
    return Vector::broadcast(reinterpret_cast<const float*>(from));
  }
  static FEWBIT_INLINE Sum add(Sum sum, Sum weight, Sum input) { return Vector::multiply_add(weight, input, sum); }
  static FEWBIT_INLINE Sum to_floats(Sum sum) { return sum; }
};

// Two bf16 numbers to a step, their products summed in float32.
template <class Vector>
struct Bf16Steps : FloatSteps<Vector> {
  using Sum = typename Vector::Floats;
  static FEWBIT_INLINE Sum add(Sum sum, Sum weight, Sum input) { return Vector::add_bf16_products(sum, weight, input); }
};

template <class Vector>
struct PairSteps {
  using Sum = typename Vector::Words;
  static FEWBIT_INLINE Sum none() { return Vector::zero_words(); }
  static FEWBIT_INLINE Sum load(const uint32_t* from) { return Vector::load(from); }
  static FEWBIT_INLINE void store(uint32_t* to, Sum sum) { Vector::store_words(to, sum); }
  static FEWBIT_INLINE Sum broadcast(const uint32_t* from) {
    return Vector::broadcast_word(reinterpret_cast<const int32_t*>(from));
  }
  static FEWBIT_INLINE Sum add(Sum sum, Sum weight, Sum input) {
    return Vector::add_words(sum, Vector::pair_products(weight, input));
  }
  static FEWBIT_INLINE typename Vector::Floats to_floats(Sum sum) { return Vector::to_floats(sum); }
};

// Rows of 32-bit words, `stride` of them apart.
template <class Word>
struct Rows {
  Word* first;
  int64_t stride;
};

// sums[width][kBlockRows] of a panel's steps times the inputs of `width` tokens: added to what is there unless `fresh`.
template <class Vector, class Steps, int width>
__attribute__((noinline)) void panel_tile(const uint32_t* panel, int64_t steps, Rows<const uint32_t> inputs,
                                          Rows<uint32_t> sums, bool fresh) {
  typename Steps::Sum own[width][kParts<Vector>];
  unroll<width>([&](auto token) FEWBIT_LAMBDA {
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const uint32_t* before = sums.first + token * sums.stride + part * Vector::kLanes;
      own[token][part] = fresh ? Steps::none() : Steps::load(before);
    });
  });
  const uint32_t* input = inputs.first;
  for (int64_t i = 0; i < steps; ++i, panel += kBlockRows, ++input) {
    typename Steps::Sum weight[kParts<Vector>];
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA { weight[part] = Steps::load(panel + part * Vector::kLanes); });
    unroll<width>([&](auto token) FEWBIT_LAMBDA {
      const auto one = Steps::broadcast(input + token * inputs.stride);
      unroll<kParts<Vector>>(
          [&](auto part) FEWBIT_LAMBDA { own[token][part] = Steps::add(own[token][part], weight[part], one); });
    });
  }
  unroll<width>([&](auto token) FEWBIT_LAMBDA {
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      Steps::store(sums.first + token * sums.stride + part * Vector::kLanes, own[token][part]);
    });
  });
}

// The same for any number of tokens and for several blocks, whose panels and sums lie one after another: the inputs of a
// tile are fetched into the first-level cache once for all of them.
template <class Vector, class Steps>
void panel_tiles(int64_t blocks, const uint32_t* panels, int64_t steps, int64_t tokens, Rows<const uint32_t> inputs,
                 Rows<uint32_t> sums, bool fresh) {
  for (int64_t first = 0; first < tokens; first += Vector::kPanelTile) {
    const int64_t left = tokens - first;
    with_width<Vector::kPanelTile>(
        static_cast<int>(left < Vector::kPanelTile ? left : Vector::kPanelTile), [&](auto width) {
          const Rows<const uint32_t> own_inputs{inputs.first + first * inputs.stride, inputs.stride};
          for (int64_t block = 0; block < blocks; ++block) {
            panel_tile<Vector, Steps, decltype(width)::value>(
                panels + block * steps * kBlockRows, steps, own_inputs,
                {sums.first + (block * tokens + first) * sums.stride, sums.stride}, fresh);
          }
        });
  }
}

// A group's numbers of the block's rows, as the panel takes them.
template <class Vector>
struct GroupNumbers {
  typename Vector::Floats scale[kParts<Vector>], zero[kParts<Vector>], minimum[kParts<Vector>];

  GroupNumbers(const Weight& weight, int64_t block, int64_t group) {
    const float* minima = weight.minima ? weight.minima + (block * weight.groups + group) * kBlockRows : nullptr;
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      scale[part] = scales_of<Vector>(weight, block, group, part);
      zero[part] = Vector::to_floats(zeros_of<Vector>(weight, block, group, part));
      minimum[part] = minima ? Vector::load_floats(minima + part * Vector::kLanes) : Vector::zero();
    });
  }
};

// The word's codes as the numbers that they stand for, without the weight's factor.
template <class Vector, class Fields>
FEWBIT_INLINE void decode_to_floats(const uint32_t* words, const GroupNumbers<Vector>& group, float* panel) {
  unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
    const auto word = Vector::load(words + part * Vector::kLanes);
    unroll<Fields::kSlots>([&](auto slot) FEWBIT_LAMBDA {
      const auto factor = Vector::broadcast(Fields::input_factor(slot));
      auto number = Fields::template decode<decltype(slot)::value>(word);
      if constexpr (Fields::kHasZero) {  // exact, so that the scale rounds once
        number = Vector::subtract_product(group.zero[part], number, factor);
        number = Vector::subtract_product(group.minimum[part], number, group.scale[part]);
      } else {
        number = Vector::multiply_add(Vector::multiply(number, factor), group.scale[part], group.minimum[part]);
      }
      Vector::store(panel + slot * kBlockRows + part * Vector::kLanes, number);
    });
  });
}

// Slots [begin, end) of a block, whole words.
template <class Vector, class Fields>
void float_panel(const Weight& weight, int64_t block, Range slots, float* panel) {
  const uint32_t* words = weight.words + (block * weight.slots() + slots.begin) / Fields::kSlots * kBlockRows;
  for (int64_t slot = slots.begin; slot < slots.end;) {
    const int64_t group = slot / weight.group_slots, end = (group + 1) * weight.group_slots;
    const GroupNumbers<Vector> numbers(weight, block, group);
    for (; slot < end && slot < slots.end; slot += Fields::kSlots) {
      decode_to_floats<Vector, Fields>(words, numbers, panel);
      words += kBlockRows;
      panel += Fields::kSlots * kBlockRows;
    }
  }
}

// Up to a block of rows of any dtype, `stride` bytes apart, of `count` numbers each; rows that are not there become zero.
template <class Vector>
void rows_panel(const char* from, int64_t stride, int64_t rows, int64_t count, Dtype dtype, float* panel) {
  for (int64_t k = 0; k < count; k += Vector::kLanes) {
    alignas(64) float numbers[kBlockRows][Vector::kLanes] = {};
    for (int64_t i = 0; i < rows && i < kBlockRows; ++i) {
      Vector::store(numbers[i], load_up_to<Vector>(from + i * stride + k * bytes_of(dtype), dtype, count - k));
    }
    const int64_t few = count - k < Vector::kLanes ? count - k : Vector::kLanes;
    for (int64_t lane = 0; lane < few; ++lane, panel += kBlockRows) {
      for (int64_t i = 0; i < kBlockRows; ++i) panel[i] = numbers[i][lane];
    }
  }
}

// Codes of a group's slots [begin, end), less their zero points, as pairs of bf16, which hold them exactly: integers to 256
// and small floats times a power of two.
template <class Vector, class Fields>
void bf16_panel(const Weight& weight, int64_t block, int64_t group, Range slots, uint32_t* panel) {
  const int64_t first = block * weight.slots() + group * weight.group_slots + slots.begin;
  const uint32_t* words = weight.words + first / Fields::kSlots * kBlockRows;
  typename Vector::Floats zeros[kParts<Vector>];
  unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
    zeros[part] = Fields::kHasZero ? Vector::to_floats(zeros_of<Vector>(weight, block, group, part)) : Vector::zero();
  });
  const auto one = Vector::broadcast(1.0f);
  const auto high = Vector::broadcast_word(static_cast<int32_t>(0xffff0000));
  for (int64_t slot = slots.begin; slot < slots.end; slot += Fields::kSlots, words += kBlockRows) {
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto word = Vector::load(words + part * Vector::kLanes);
      const auto number = [&](auto slot) FEWBIT_LAMBDA {
        const auto product = Vector::multiply(Fields::template decode<decltype(slot)::value>(word),
                                              Vector::broadcast(Fields::input_factor(slot)));
        return Vector::as_words(Vector::subtract_product(product, zeros[part], one));
      };
      unroll<Fields::kSlots / 2>([&](auto pair) FEWBIT_LAMBDA {
        constexpr int kFirst = 2 * decltype(pair)::value;
        const auto first = number(std::integral_constant<int, kFirst>{});
        const auto second = number(std::integral_constant<int, kFirst + 1>{});
        Vector::store_words(panel + pair * kBlockRows + part * Vector::kLanes,
                            Vector::add_words(Vector::template right<16>(first), Vector::bits_of(second, high)));
      });
    });
    panel += Fields::kSlots / 2 * kBlockRows;
  }
}

// Byte codes of a group's slots [begin, end), less their zero points, as pairs of 16-bit integers.
template <class Vector>
void pair_panel(const Weight& weight, int64_t block, int64_t group, Range slots, uint32_t* panel) {
  const int64_t first = block * weight.slots() + group * weight.group_slots + slots.begin;
  const uint32_t* words = weight.words + first / 4 * kBlockRows;
  typename Vector::Words zeros[kParts<Vector>];
  unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
    const auto zero = zeros_of<Vector>(weight, block, group, part);
    zeros[part] = Vector::add_words(zero, Vector::template left<16>(zero));
  });
  const auto low = Vector::broadcast_word(0xff), high = Vector::broadcast_word(0xff << 16);
  for (int64_t slot = slots.begin; slot < slots.end; slot += 4, words += kBlockRows, panel += 2 * kBlockRows) {
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto word = Vector::load(words + part * Vector::kLanes);
      const auto first = Vector::add_words(Vector::bits_of(word, low),
                                           Vector::bits_of(Vector::template left<8>(word), high));
      const auto second = Vector::add_words(Vector::bits_of(Vector::template right<16>(word), low),
                                            Vector::bits_of(Vector::template right<8>(word), high));
      uint32_t* to = panel + part * Vector::kLanes;
      Vector::store_words(to, Vector::subtract_halves(first, zeros[part]));
      Vector::store_words(to + kBlockRows, Vector::subtract_halves(second, zeros[part]));
    });
  }
}

}  // namespace
}  // namespace fewbit
