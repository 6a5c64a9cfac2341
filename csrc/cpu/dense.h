// Plain weights [N, K] times a few tokens: what a decoder keeps unquantized, its head above all.
#pragma once

#include "threads.h"
#include "vectors.h"

namespace fewbit {
namespace {

// Rows at a time, so that several sums are in flight and the input is read once for all of them.
constexpr int kDenseRows = 4;

// y of `count` rows from `row`, for one token whose input lies in float32.
template <class Vector, int count>
void dense_rows(const Job& job, int64_t row, const float* input, char* y) {
  const Weight& weight = job.weight;
  const int64_t stride = weight.columns * bytes_of(job.dtype);
  const char* from = reinterpret_cast<const char*>(weight.words) + row * stride;
  typename Vector::Floats sums[count];
  unroll<count>([&](auto i) FEWBIT_LAMBDA { sums[i] = Vector::zero(); });
  const int64_t whole = weight.columns / Vector::kLanes * Vector::kLanes;
  for (int64_t k = 0; k < whole; k += Vector::kLanes) {
    // The rows after these, a line of memory at a time: the prefetchers of the hardware lose track of several rows.
    if (k % (64 / 2) == 0) {
      unroll<count>([&](auto i) FEWBIT_LAMBDA {
        __builtin_prefetch(from + (count + i) * stride + k * bytes_of(job.dtype));
      });
    }
    const auto x = Vector::load_floats(input + k);
    unroll<count>([&](auto i) FEWBIT_LAMBDA {
      const auto w = load_as_floats<Vector>(from + i * stride + k * bytes_of(job.dtype), job.dtype);
      sums[i] = Vector::multiply_add(w, x, sums[i]);
    });
  }
  for (int i = 0; i < count; ++i) {
    if (whole < weight.columns) {
      const auto w = load_few<Vector>(from + i * stride + whole * bytes_of(job.dtype), job.dtype,
                                      weight.columns - whole);
      sums[i] = Vector::multiply_add(w, Vector::load_floats(input + whole), sums[i]);
    }
    auto total = Vector::broadcast(Vector::sum(sums[i]));
    if (job.bias) {
      const char* bias = static_cast<const char*>(job.bias) + (row + i) * bytes_of(job.dtype);
      total = Vector::add(total, load_few<Vector>(bias, job.dtype, 1));
    }
    store_up_to<Vector>(y + (row + i) * bytes_of(job.dtype), job.dtype, total, 1);
  }
}

template <class Vector>
void dense_blocks(const Job& job, Range blocks) {
  const Weight& weight = job.weight;
  float* input = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 4));
  const int64_t end = blocks.end * kBlockRows < weight.rows ? blocks.end * kBlockRows : weight.rows;
  for (int64_t token = 0; token < job.tokens; ++token) {
    row_to_floats<Vector>(token_row(job, token), job.dtype, weight.columns, input);
    char* y = static_cast<char*>(job.y) + token * weight.rows * bytes_of(job.dtype);
    int64_t row = blocks.begin * kBlockRows;
    for (; row + kDenseRows <= end; row += kDenseRows) dense_rows<Vector, kDenseRows>(job, row, input, y);
    for (; row < end; ++row) dense_rows<Vector, 1>(job, row, input, y);
  }
}

}  // namespace
}  // namespace fewbit
