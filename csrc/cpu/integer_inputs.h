// Activations rounded to integers, in the order in which integer tiles read them.
#pragma once

#include <cfloat>

#include "integer_tile.h"

namespace fewbit {
namespace {

// The largest magnitude of the row; `row` is padded with zeros to whole vectors.
template <class Vector>
float largest_of(const float* row, int64_t count) {
  const auto magnitude = Vector::broadcast_word(0x7fffffff);
  auto largest = Vector::zero();
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    largest = Vector::larger(
        largest, Vector::as_floats(Vector::bits_of(Vector::as_words(Vector::load_floats(row + i)), magnitude)));
  }
  return Vector::largest(largest);
}

// The scale that brings the largest magnitude to the ends of the codes' range.
inline float scale_for(float largest, const Rounding& rounding) {
  const float scale = largest / ((rounding.high - rounding.low) / 2);
  return scale > FLT_MIN ? scale : FLT_MIN;
}

// Codes of a row, in place of its numbers: round(number / scale) within the range.
template <class Vector>
void round_row(const float* row, int64_t count, float scale, const Rounding& rounding, int8_t* codes) {
  const auto divisor = Vector::broadcast(scale);
  const auto low = Vector::broadcast(rounding.low), high = Vector::broadcast(rounding.high);
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    const auto quotient = Vector::round_to_even(Vector::divide(Vector::load_floats(row + i), divisor));
    int32_t words[Vector::kLanes];
    const auto code = Vector::to_words(Vector::smaller(Vector::larger(quotient, low), high));
    std::memcpy(words, &code, sizeof words);
    for (int lane = 0; lane < Vector::kLanes; ++lane) codes[i + lane] = static_cast<int8_t>(words[lane]);
  }
}

// One token of a tile. `codes` is the row's, `slots` room for the weight's slots, `inputs` [words][kInputWords][width],
// `sums` [groups][width].
template <class Products>
void place_codes(const Weight& weight, const int8_t* codes, int8_t* slots, int width, int token, int32_t* inputs,
                 int32_t* sums) {
  if (has_padding(weight)) std::memset(slots, 0, static_cast<size_t>(weight.slots()));
  for (int64_t group = 0; group < weight.groups; ++group) {
    int32_t sum = 0;
    each_feature(weight, group, [&](int64_t slot, int64_t feature) {
      slots[slot] = codes[feature];
      sum += codes[feature];
    });
    sums[group * width + token] = sum;
  }
  for (int64_t slot = 0; slot < weight.slots(); slot += Products::kSlots) {
    Products::place(slots + slot, inputs + slot / Products::kSlots * Products::kInputWords * width + token, width);
  }
}

}  // namespace
}  // namespace fewbit
