// Weights times float32 activations: a block of 16 output features by a tile of tokens.
#pragma once

#include "decode.h"
#include "finish.h"

namespace fewbit {
namespace {

// So many sums at least must be in flight to hide the latency of an addition.
constexpr int kSumsInFlight = 8;

template <class Vector, class Fields, int width>
constexpr int chains() {
  int count = 1;
  while (2 * count <= Fields::kSlots && count * width * kParts<Vector> < kSumsInFlight) count *= 2;
  return count;
}

// Adds the codes of one word to the sums: `inputs` is [slots of the word][width].
template <class Vector, class Fields, int width, int count>
FEWBIT_INLINE void add_word(const uint32_t* words, const float* inputs,
                            typename Vector::Floats (&sums)[count][width][kParts<Vector>]) {
  typename Vector::Words word[kParts<Vector>];
  unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA { word[part] = Vector::load(words + part * Vector::kLanes); });
  unroll<Fields::kSlots>([&](auto slot) FEWBIT_LAMBDA {
    typename Vector::Floats value[kParts<Vector>];
    unroll<kParts<Vector>>(
        [&](auto part) FEWBIT_LAMBDA { value[part] = Fields::template decode<decltype(slot)::value>(word[part]); });
    unroll<width>([&](auto token) FEWBIT_LAMBDA {
      const auto input = Vector::broadcast(inputs + slot * width + token);
      unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
        auto& sum = sums[slot % count][token][part];
        sum = Vector::multiply_add(value[part], input, sum);
      });
    });
  });
}

// totals[width][kBlockRows] of one block. `inputs` [slots][width] and `input_sums` [groups][width] as `inputs.h` places
// them; the latter may be null where the weight has neither zeros nor minima.
template <class Vector, class Fields, int width>
__attribute__((noinline)) void float_tile(const Weight& weight, int64_t block, const float* inputs,
                                          const float* input_sums, float* totals) {
  constexpr int kChains = chains<Vector, Fields, width>();
  const int64_t words_per_group = weight.group_slots / Fields::kSlots;
  const uint32_t* words = weight.words + block * weight.groups * words_per_group * kBlockRows;
  for (int i = 0; i < width * kParts<Vector>; ++i) Vector::store(totals + i * Vector::kLanes, Vector::zero());
  for (int64_t group = 0; group < weight.groups; ++group) {
    typename Vector::Floats sums[kChains][width][kParts<Vector>];
    unroll<kChains>([&](auto chain) FEWBIT_LAMBDA {
      unroll<width>([&](auto token) FEWBIT_LAMBDA {
        unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA { sums[chain][token][part] = Vector::zero(); });
      });
    });
    for (int64_t i = 0; i < words_per_group; ++i) {
      if constexpr (width <= 2) __builtin_prefetch(words + kPrefetchWords);
      add_word<Vector, Fields, width, kChains>(words, inputs, sums);
      words += kBlockRows;
      inputs += Fields::kSlots * width;
    }
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto scale = scales_of<Vector>(weight, block, group, part);
      auto zero = Vector::zero();
      if constexpr (Fields::kHasZero) zero = Vector::to_floats(zeros_of<Vector>(weight, block, group, part));
      unroll<width>([&](auto token) FEWBIT_LAMBDA {
        auto sum = sums[0][token][part];
        unroll<kChains - 1>([&](auto chain) FEWBIT_LAMBDA { sum = Vector::add(sum, sums[chain + 1][token][part]); });
        if constexpr (Fields::kHasZero) {
          sum = Vector::subtract_product(sum, zero, Vector::broadcast(input_sums + group * width + token));
        }
        float* total = totals + token * kBlockRows + part * Vector::kLanes;
        Vector::store(total, Vector::multiply_add(scale, sum, Vector::load_floats(total)));
      });
    });
  }
}

// Adds the groups' minima times their sums of inputs.
template <class Vector>
void add_minima(const Weight& weight, int64_t block, int width, const float* input_sums, float* totals) {
  const float* minima = weight.minima + block * weight.groups * kBlockRows;
  for (int64_t group = 0; group < weight.groups; ++group, minima += kBlockRows, input_sums += width) {
    for (int token = 0; token < width; ++token) {
      const auto sum = Vector::broadcast(input_sums[token]);
      for (int part = 0; part < kParts<Vector>; ++part) {
        float* total = totals + token * kBlockRows + part * Vector::kLanes;
        const auto minimum = Vector::load_floats(minima + part * Vector::kLanes);
        Vector::store(total, Vector::multiply_add(minimum, sum, Vector::load_floats(total)));
      }
    }
  }
}

}  // namespace
}  // namespace fewbit
