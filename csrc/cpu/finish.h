// What both kinds of tiles share: scales and zero points of a block, and writing its sums out.
#pragma once

#include "vectors.h"

namespace fewbit {
namespace {

// How far ahead of its use a word is asked for, 2 KiB: the prefetchers of the hardware stop at each page.
constexpr int64_t kPrefetchWords = 512;

template <class Vector>
constexpr int kParts = kBlockRows / Vector::kLanes;  // vectors to a block

// The group's scales of the block's rows [part * lanes, (part + 1) * lanes).
template <class Vector>
FEWBIT_INLINE typename Vector::Floats scales_of(const Weight& weight, int64_t block, int64_t group, int part) {
  const int64_t at = (block * weight.groups + group) * kBlockRows + part * Vector::kLanes;
  return load_as_floats<Vector>(static_cast<const char*>(weight.scales) + at * bytes_of(weight.scale_dtype),
                                weight.scale_dtype);
}

// The group's zero points as words, likewise.
template <class Vector>
FEWBIT_INLINE typename Vector::Words zeros_of(const Weight& weight, int64_t block, int64_t group, int part) {
  if (!weight.zeros) return Vector::broadcast_word(weight.constant_zero);
  return Vector::widen_bytes(weight.zeros + (block * weight.groups + group) * kBlockRows + part * Vector::kLanes);
}

// Scales the sums [width][kBlockRows] of a tile, adds the bias, rounds and writes what lies within N: token by token, since
// rows of y lie far apart.
template <class Vector>
void write_out(const Job& job, int64_t block, int64_t first_token, int width, const float* sums,
               const float* token_scales) {
  const Weight& weight = job.weight;
  const int64_t row = block * kBlockRows, count = weight.rows - row, size = bytes_of(job.dtype);
  typename Vector::Floats bias[kParts<Vector>];
  for (int part = 0; part < kParts<Vector>; ++part) {
    const int64_t at = part * Vector::kLanes;
    bias[part] = Vector::zero();
    if (job.bias && count > at) {
      bias[part] = load_up_to<Vector>(static_cast<const char*>(job.bias) + (row + at) * size, job.dtype, count - at);
    }
  }
  char* to = static_cast<char*>(job.y) + (first_token * weight.rows + row) * size;
  for (int token = 0; token < width; ++token, to += weight.rows * size) {
    const auto factor = Vector::broadcast(token_scales ? weight.factor * token_scales[token] : weight.factor);
    for (int part = 0; part < kParts<Vector> && part * Vector::kLanes < count; ++part) {
      const int64_t at = part * Vector::kLanes;
      const auto sum = Vector::load_floats(sums + token * kBlockRows + at);
      store_up_to<Vector>(to + at * size, job.dtype, Vector::multiply_add(sum, factor, bias[part]), count - at);
    }
  }
}

}  // namespace
}  // namespace fewbit
