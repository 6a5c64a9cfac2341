// What a decoder does to a row between its linear layers. Each operation rounds to the dtype where torch's own module
// does, so that a row differs from the module's by the order of sums alone.
#pragma once

#include <cmath>

#include "vectors.h"

namespace fewbit {
namespace {

// The value as it is once stored in the dtype.
template <class Vector>
FEWBIT_INLINE typename Vector::Floats rounded(typename Vector::Floats value, Dtype dtype) {
  if (dtype == Dtype::kF32) return value;
  if (dtype == Dtype::kBf16) {  // as to_bf16 does it: half a unit is added, less one where the kept part is even
    const auto bits = Vector::as_words(value);
    const auto odd = Vector::bits_of(Vector::template right<16>(bits), Vector::broadcast_word(1));
    const auto sum = Vector::add_words(bits, Vector::add_words(odd, Vector::broadcast_word(0x7fff)));
    return Vector::as_floats(Vector::bits_of(sum, Vector::broadcast_word(static_cast<int32_t>(0xffff0000))));
  }
  alignas(64) char stored[4 * Vector::kLanes];
  store_from_floats<Vector>(stored, dtype, value);
  return load_as_floats<Vector>(stored, dtype);
}

// e**x to about two units in the last place; 0 below -87, where float32 has no normal number.
template <class Vector>
FEWBIT_INLINE typename Vector::Floats exponential(typename Vector::Floats x) {
  const auto least = Vector::broadcast(-87.0f);
  const auto bounded = Vector::smaller(Vector::broadcast(88.0f), Vector::larger(least, x));  // in this order NaN stays
  const auto power = Vector::round_to_even(Vector::multiply(bounded, Vector::broadcast(1.44269504f)));
  // ln 2 in two parts, so that the remainder is exact.
  auto rest = Vector::subtract_product(bounded, power, Vector::broadcast(0.693359375f));
  rest = Vector::subtract_product(rest, power, Vector::broadcast(-2.12194440e-4f));
  constexpr float kTaylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  auto sum = Vector::zero();
  for (const float coefficient : kTaylor) sum = Vector::multiply_add(sum, rest, Vector::broadcast(coefficient));
  const auto exponent = Vector::add_words(Vector::to_words(power), Vector::broadcast_word(127));
  return Vector::multiply(sum, Vector::as_floats(Vector::template left<23>(exponent)));
}

// to[i] = operation(a[i], b[i]) for rows of the dtype.
template <class Vector, class Operation>
FEWBIT_INLINE void each(const void* a, const void* b, void* to, int64_t count, Dtype dtype, Operation&& operation) {
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    const int64_t at = i * bytes_of(dtype);
    const auto result = operation(load_up_to<Vector>(static_cast<const char*>(a) + at, dtype, count - i),
                                  load_up_to<Vector>(static_cast<const char*>(b) + at, dtype, count - i));
    store_up_to<Vector>(static_cast<char*>(to) + at, dtype, result, count - i);
  }
}

template <class Vector>
void add_rows(const void* a, const void* b, void* to, int64_t count, Dtype dtype) {
  each<Vector>(a, b, to, count, dtype, [](auto x, auto y) FEWBIT_LAMBDA { return Vector::add(x, y); });
}

// to = silu(gate) * up.
template <class Vector>
void silu_and_multiply(const void* gate, const void* up, void* to, int64_t count, Dtype dtype) {
  each<Vector>(gate, up, to, count, dtype, [&](auto g, auto u) FEWBIT_LAMBDA {
    const auto one = Vector::broadcast(1.0f);
    const auto below = exponential<Vector>(Vector::subtract_product(Vector::zero(), g, one));
    return Vector::multiply(rounded<Vector>(Vector::divide(g, Vector::add(one, below)), dtype), u);
  });
}

template <class Vector>
void rms_norm(const void* x, const void* weight, void* to, int64_t count, double epsilon, Dtype dtype) {
  auto squares = Vector::zero();
  for (int64_t i = 0; i < count; i += Vector::kLanes) {
    const auto value =
        load_up_to<Vector>(static_cast<const char*>(x) + i * bytes_of(dtype), dtype, count - i);
    squares = Vector::multiply_add(value, value, squares);
  }
  const float mean = Vector::sum(squares) / static_cast<float>(count);
  const auto factor = Vector::broadcast(1.0f / std::sqrt(mean + static_cast<float>(epsilon)));
  each<Vector>(x, weight, to, count, dtype, [&](auto value, auto w) FEWBIT_LAMBDA {
    return Vector::multiply(rounded<Vector>(Vector::multiply(value, factor), dtype), w);
  });
}

// One head [2 * half] turned by its position, the second half of its features being the other coordinate of the first.
template <class Vector>
void rotate(const void* head, const float* cosines, const float* sines, void* to, int64_t half, Dtype dtype) {
  const char *low = static_cast<const char*>(head), *high = low + half * bytes_of(dtype);
  char *to_low = static_cast<char*>(to), *to_high = to_low + half * bytes_of(dtype);
  for (int64_t i = 0; i < half; i += Vector::kLanes) {
    const int64_t at = i * bytes_of(dtype), left = half - i;
    const auto a = load_up_to<Vector>(low + at, dtype, left), b = load_up_to<Vector>(high + at, dtype, left);
    const auto c = load_up_to<Vector>(cosines + i, Dtype::kF32, left);
    const auto s = load_up_to<Vector>(sines + i, Dtype::kF32, left);
    const auto product = [&](auto x, auto y) FEWBIT_LAMBDA { return rounded<Vector>(Vector::multiply(x, y), dtype); };
    const auto one = Vector::broadcast(1.0f);
    store_up_to<Vector>(to_low + at, dtype, Vector::subtract_product(product(a, c), product(b, s), one), left);
    store_up_to<Vector>(to_high + at, dtype, Vector::add(product(b, c), product(a, s)), left);
  }
}

}  // namespace
}  // namespace fewbit
