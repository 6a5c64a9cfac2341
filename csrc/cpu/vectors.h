// Loops over vectors that every file shares: compile-time unrolling, and rows of any dtype to and from float32.
//
// This header and those built on it are compiled once for each instruction set. All of it has internal linkage, or the
// linker would keep one instruction set's copy of a function for all of them.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "job.h"

namespace fewbit {
namespace {

#define FEWBIT_INLINE __attribute__((always_inline)) inline
#define FEWBIT_LAMBDA __attribute__((always_inline))

template <class Visit, int... index>
FEWBIT_INLINE void unrolled(Visit&& visit, std::integer_sequence<int, index...>) {
  (visit(std::integral_constant<int, index>{}), ...);
}

// visit(0), visit(1), ... with compile-time numbers.
template <int count, class Visit>
FEWBIT_INLINE void unroll(Visit&& visit) {
  unrolled(visit, std::make_integer_sequence<int, count>{});
}

// visit(width) with a compile-time width, 1 <= width <= most.
template <int most, class Visit>
void with_width(int width, Visit&& visit) {
  if constexpr (most > 1) {
    if (width < most) return with_width<most - 1>(width, visit);
  }
  visit(std::integral_constant<int, most>{});
}

inline constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

template <class Vector>
FEWBIT_INLINE typename Vector::Floats load_as_floats(const void* from, Dtype dtype) {
  if (dtype == Dtype::kBf16) return Vector::from_bf16(from);
  return dtype == Dtype::kF16 ? Vector::from_f16(from) : Vector::load_floats(static_cast<const float*>(from));
}

// The first `count` numbers of a vector, the others zero; reads nothing beyond them.
template <class Vector>
typename Vector::Floats load_few(const void* from, Dtype dtype, int64_t count) {
  char whole[4 * Vector::kLanes] = {};
  std::memcpy(whole, from, static_cast<size_t>(count * bytes_of(dtype)));
  return load_as_floats<Vector>(whole, dtype);
}

template <class Vector>
FEWBIT_INLINE typename Vector::Floats load_up_to(const void* from, Dtype dtype, int64_t count) {
  return count >= Vector::kLanes ? load_as_floats<Vector>(from, dtype) : load_few<Vector>(from, dtype, count);
}

template <class Vector>
FEWBIT_INLINE void store_from_floats(void* to, Dtype dtype, typename Vector::Floats value) {
  if (dtype == Dtype::kBf16) return Vector::to_bf16(to, value);
  if (dtype == Dtype::kF16) return Vector::to_f16(to, value);
  Vector::store(static_cast<float*>(to), value);
}

// The first `count` numbers of a vector; writes nothing beyond them.
template <class Vector>
void store_few(void* to, Dtype dtype, typename Vector::Floats value, int64_t count) {
  char whole[4 * Vector::kLanes];
  store_from_floats<Vector>(whole, dtype, value);
  std::memcpy(to, whole, static_cast<size_t>(count * bytes_of(dtype)));
}

template <class Vector>
FEWBIT_INLINE void store_up_to(void* to, Dtype dtype, typename Vector::Floats value, int64_t count) {
  if (count >= Vector::kLanes) return store_from_floats<Vector>(to, dtype, value);
  store_few<Vector>(to, dtype, value, count);
}

// A row of `count` numbers as float32. `to` has room for whole vectors.
template <class Vector>
void row_to_floats(const void* from, Dtype dtype, int64_t count, float* to) {
  const char* bytes = static_cast<const char*>(from);
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    Vector::store(to + i, load_up_to<Vector>(bytes + i * bytes_of(dtype), dtype, count - i));
  }
}

inline const void* token_row(const Job& job, int64_t token) {
  return static_cast<const char*>(job.x) + token * job.weight.columns * bytes_of(job.dtype);
}

inline constexpr int64_t whole_vectors(int64_t count) { return (count + 15) / 16 * 16; }

}  // namespace
}  // namespace fewbit
