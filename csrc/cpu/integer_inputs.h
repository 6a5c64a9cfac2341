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

// The scale of all tokens, 0 where each has its own.
template <class Vector>
float common_scale(const Job& job, const Rounding& rounding) {
  if (rounding.stored_scale) return *rounding.stored_scale;
  if (rounding.per_token) return 0;
  float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(job.weight.columns) * 4));
  float largest = 0;
  for (int64_t token = 0; token < job.tokens; ++token) {
    row_to_floats<Vector>(token_row(job, token), job.dtype, job.weight.columns, row);
    const float found = largest_of<Vector>(row, job.weight.columns);
    largest = found > largest ? found : largest;
  }
  return scale_for(largest, rounding);
}

// store(index, codes) for each vector of a row's codes: round(number / scale) within the range.
template <class Vector, class Store>
FEWBIT_INLINE void round_row(const float* row, int64_t count, float scale, const Rounding& rounding, Store&& store) {
  const auto divisor = Vector::broadcast(scale);
  const auto low = Vector::broadcast(rounding.low), high = Vector::broadcast(rounding.high);
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    const auto quotient = Vector::round_to_even(Vector::divide(Vector::load_floats(row + i), divisor));
    store(i, Vector::to_words(Vector::smaller(Vector::larger(quotient, low), high)));
  }
}

template <class Vector>
void round_to_bytes(const float* row, int64_t count, float scale, const Rounding& rounding, int8_t* codes) {
  round_row<Vector>(row, count, scale, rounding,
                    [&](int64_t i, auto code) FEWBIT_LAMBDA { Vector::store_bytes(codes + i, code); });
}

template <class Vector>
void round_to_halves(const float* row, int64_t count, float scale, const Rounding& rounding, int16_t* codes) {
  round_row<Vector>(row, count, scale, rounding,
                    [&](int64_t i, auto code) FEWBIT_LAMBDA { Vector::store_narrow(codes + i, code); });
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
