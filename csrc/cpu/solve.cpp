// The inner loops of the algorithms that choose codes, for CPUs with AVX2: a library of its own, which knows grids and
// errors but no layouts. Weights come transposed, [K, N]: a vector holds one input feature of neighbouring rows, so
// that rows, which are independent, need nothing of each other and results do not depend on the number of threads.
// Sizes are checked on the Python side.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "threads.h"

namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kWide = 2 * kLanes;  // rows that go through a panel together
constexpr int64_t kMostFeatures = 256;  // of a panel, and of a group whose whole block of H is used

// Whose numbers are chosen: integers low..high, or floats with so many bits of fraction.
struct Element {
  int32_t is_integer;
  int32_t mantissa_bits;
  int32_t min_exponent;
  float low, high;
};

struct Nearest {
  explicit Nearest(const Element& element)
      : low(_mm256_set1_ps(element.low)), high(_mm256_set1_ps(element.high)), is_integer(element.is_integer),
        lowest(_mm256_set1_epi32(element.min_exponent + 127)), fraction(_mm256_set1_epi32(element.mantissa_bits)) {}

  __m256 operator()(__m256 steps) const {
    steps = _mm256_min_ps(_mm256_max_ps(steps, low), high);
    constexpr int kToEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if (is_integer) return _mm256_round_ps(steps, kToEven);
    const __m256i bits = _mm256_castps_si256(steps);
    const __m256i exponent = _mm256_and_si256(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(255));
    const __m256i spacing = _mm256_sub_epi32(_mm256_max_epi32(exponent, lowest), fraction);
    const __m256 step = _mm256_castsi256_ps(_mm256_slli_epi32(spacing, 23));  // a power of two: both ways are exact
    return _mm256_mul_ps(_mm256_round_ps(_mm256_div_ps(steps, step), kToEven), step);
  }

  __m256 low, high;
  int32_t is_integer;
  __m256i lowest, fraction;
};

// `count` of kWide numbers; the others are `rest`.
inline void load_row(const float* from, int64_t count, float rest, __m256* to) {
  if (count >= kWide) {
    to[0] = _mm256_loadu_ps(from);
    to[1] = _mm256_loadu_ps(from + kLanes);
    return;
  }
  alignas(32) float whole[kWide];
  std::fill(whole, whole + kWide, rest);
  std::memcpy(whole, from, static_cast<size_t>(count) * sizeof(float));
  to[0] = _mm256_load_ps(whole);
  to[1] = _mm256_load_ps(whole + kLanes);
}

inline void store_row(float* to, int64_t count, const __m256* from) {
  if (count >= kWide) {
    _mm256_storeu_ps(to, from[0]);
    _mm256_storeu_ps(to + kLanes, from[1]);
    return;
  }
  alignas(32) float whole[kWide];
  _mm256_store_ps(whole, from[0]);
  _mm256_store_ps(whole + kLanes, from[1]);
  std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(float));
}

struct Panel {
  const float* weight;   // [features, rows]
  const float* factor;   // upper triangular [features, features], its diagonal included
  const float* drift;    // strictly upper triangular [features, features], or null
  const float* held;     // [features, rows] that errors are taken from instead of the weights, or null
  const float* scale;    // [features, rows]
  const float* zero;     // the same, or null
  float* values;         // [features, rows]
  float* errors;         // the same
  int64_t features, rows;
};

// Rounds the features of a panel in their order, the error of each carried on to those after it.
void compensate(const Panel& panel, const Element& element, int64_t first) {
  const Nearest nearest(element);
  const int64_t count = std::min(kWide, panel.rows - first), features = panel.features;
  alignas(32) __m256 errors[kMostFeatures][2], seen[kMostFeatures][2];
  for (int64_t i = 0; i < features; ++i) {
    __m256 weight[2], scale[2];
    __m256 held[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()}, zero[2] = {held[0], held[1]};
    const int64_t at = i * panel.rows + first;
    load_row(panel.weight + at, count, 0.0f, weight);
    __m256 other[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t j = 0;
    for (; j + 1 < i; j += 2) {  // two chains
      const __m256 one = _mm256_broadcast_ss(panel.factor + j * features + i);
      const __m256 two = _mm256_broadcast_ss(panel.factor + (j + 1) * features + i);
      weight[0] = _mm256_fnmadd_ps(one, errors[j][0], weight[0]);
      weight[1] = _mm256_fnmadd_ps(one, errors[j][1], weight[1]);
      other[0] = _mm256_fnmadd_ps(two, errors[j + 1][0], other[0]);
      other[1] = _mm256_fnmadd_ps(two, errors[j + 1][1], other[1]);
    }
    for (; j < i; ++j) {
      const __m256 one = _mm256_broadcast_ss(panel.factor + j * features + i);
      weight[0] = _mm256_fnmadd_ps(one, errors[j][0], weight[0]);
      weight[1] = _mm256_fnmadd_ps(one, errors[j][1], weight[1]);
    }
    if (panel.drift) {
      for (j = 0; j < i; ++j) {
        const __m256 one = _mm256_broadcast_ss(panel.drift + j * features + i);
        other[0] = _mm256_fmadd_ps(one, seen[j][0], other[0]);
        other[1] = _mm256_fmadd_ps(one, seen[j][1], other[1]);
      }
    }
    load_row(panel.scale + at, count, 1.0f, scale);
    if (panel.zero) load_row(panel.zero + at, count, 0.0f, zero);
    if (panel.held) load_row(panel.held + at, count, 0.0f, held);
    const __m256 diagonal = _mm256_broadcast_ss(panel.factor + i * features + i);
    __m256 values[2];
    for (int half = 0; half < 2; ++half) {
      const __m256 now = _mm256_add_ps(weight[half], other[half]);
      values[half] = nearest(_mm256_add_ps(_mm256_div_ps(now, scale[half]), zero[half]));
      const __m256 meaning = _mm256_mul_ps(_mm256_sub_ps(values[half], zero[half]), scale[half]);
      errors[i][half] = _mm256_div_ps(_mm256_sub_ps(panel.held ? held[half] : now, meaning), diagonal);
      seen[i][half] = now;
    }
    store_row(panel.values + at, count, values);
    store_row(panel.errors + at, count, errors[i]);
  }
}

struct Search {
  const float* weight;  // [groups * width, rows]
  const float* scale;   // [candidates, groups, rows]
  const float* zero;    // the same, or null
  const float* blocks;  // [groups, width, width], or [groups, width] where `diagonal`, or null
  float* errors;        // [candidates, groups, rows]
  int64_t candidates, groups, width, rows;
  int32_t diagonal;
};

// What feature i adds to d^T H d: twice its product with those after it, of which `sums` has those from `last` on, and
// once with itself.
inline void add_feature(const float* block, const __m256 (*difference)[2], int64_t i, int64_t last, int64_t width,
                        const __m256* sums, __m256* total) {
  const float* row = block + i * width;
  const __m256 half = _mm256_set1_ps(0.5f * row[i]);
  for (int part = 0; part < 2; ++part) {
    __m256 sum = _mm256_fmadd_ps(half, difference[i][part], sums[part]);
    for (int64_t j = i + 1; j < last; ++j) {
      sum = _mm256_fmadd_ps(_mm256_broadcast_ss(row + j), difference[j][part], sum);
    }
    total[part] = _mm256_fmadd_ps(_mm256_add_ps(sum, sum), difference[i][part], total[part]);
  }
}

// d^T H d of kWide rows, H symmetric: what is above the diagonal twice. Four features at a time, so that what is loaded
// of d serves all of them; what they have with each other comes last.
inline void quadratic_form(const float* block, const __m256 (*difference)[2], int64_t width, __m256* total) {
  int64_t i = 0;
  for (; i + 4 <= width; i += 4) {
    const __m256 none = _mm256_setzero_ps();
    __m256 a0 = none, a1 = none, b0 = none, b1 = none, c0 = none, c1 = none, d0 = none, d1 = none;
    const float* row = block + (i + 4) * width + i;
    for (int64_t j = i + 4; j < width; ++j, row += width) {
      const __m256 low = difference[j][0], high = difference[j][1];
      const __m256 a = _mm256_broadcast_ss(row), b = _mm256_broadcast_ss(row + 1);
      const __m256 c = _mm256_broadcast_ss(row + 2), d = _mm256_broadcast_ss(row + 3);
      a0 = _mm256_fmadd_ps(a, low, a0), a1 = _mm256_fmadd_ps(a, high, a1);
      b0 = _mm256_fmadd_ps(b, low, b0), b1 = _mm256_fmadd_ps(b, high, b1);
      c0 = _mm256_fmadd_ps(c, low, c0), c1 = _mm256_fmadd_ps(c, high, c1);
      d0 = _mm256_fmadd_ps(d, low, d0), d1 = _mm256_fmadd_ps(d, high, d1);
    }
    const __m256 sums[4][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
    for (int64_t k = 0; k < 4; ++k) add_feature(block, difference, i + k, i + 4, width, sums[k], total);
  }
  const __m256 none[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (; i < width; ++i) add_feature(block, difference, i, width, width, none, total);
}

// The error of each group of kWide rows under one scale and zero point each. `tile` has the group's features one after
// the other, `stride` numbers apart.
void group_errors(const Search& search, const Nearest& nearest, int64_t candidate, int64_t group, int64_t first,
                  const float* tile, int64_t stride) {
  const int64_t count = std::min(kWide, search.rows - first), width = search.width;
  const int64_t at = (candidate * search.groups + group) * search.rows + first;
  const int64_t readable = stride == kWide ? kWide : count;
  const bool whole = search.blocks && !search.diagonal;
  alignas(32) __m256 difference[kMostFeatures][2];
  __m256 scale[2], inverse[2], zero[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  load_row(search.scale + at, count, 1.0f, scale);
  if (search.zero) load_row(search.zero + at, count, 0.0f, zero);
  for (int half = 0; half < 2; ++half) inverse[half] = _mm256_div_ps(_mm256_set1_ps(1.0f), scale[half]);
  __m256 total[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int64_t k = 0; k < width; ++k) {
    __m256 weight[2];
    load_row(tile + k * stride, readable, 0.0f, weight);
    const __m256 energy = _mm256_set1_ps(search.diagonal ? search.blocks[group * width + k] : 1.0f);
    for (int half = 0; half < 2; ++half) {
      const __m256 value = nearest(_mm256_fmadd_ps(weight[half], inverse[half], zero[half]));
      const __m256 error = _mm256_fmsub_ps(_mm256_sub_ps(value, zero[half]), scale[half], weight[half]);
      if (whole) {
        difference[k][half] = error;
      } else {
        total[half] = _mm256_fmadd_ps(_mm256_mul_ps(error, error), energy, total[half]);
      }
    }
  }
  if (whole) quadratic_form(search.blocks + group * width * width, difference, width, total);
  store_row(search.errors + at, count, total);
}

// All candidates of kWide rows of a group, whose weights are copied together where they are not too many.
void search_tile(const Search& search, const Nearest& nearest, int64_t group, int64_t first) {
  const float* tile = search.weight + group * search.width * search.rows + first;
  int64_t stride = search.rows;
  alignas(32) float copy[kMostFeatures * kWide];
  if (search.width <= kMostFeatures) {
    for (int64_t k = 0; k < search.width; ++k) {
      __m256 row[2];
      load_row(tile + k * stride, std::min(kWide, search.rows - first), 0.0f, row);
      store_row(copy + k * kWide, kWide, row);
    }
    tile = copy, stride = kWide;
  }
  for (int64_t candidate = 0; candidate < search.candidates; ++candidate) {
    group_errors(search, nearest, candidate, group, first, tile, stride);
  }
}

template <class Work>
void for_each_tile(int64_t items, int32_t threads, Work&& work) {
  fewbit::parallel_for_thread(threads, [&](int thread, int count) {
    const fewbit::Range mine = fewbit::share(items, thread, count);
    for (int64_t item = mine.begin; item < mine.end; ++item) work(item);
  });
}

}  // namespace

#define FEWBIT_EXPORT extern "C" __attribute__((visibility("default")))

FEWBIT_EXPORT int32_t fewbit_solve_version() { return 1; }

FEWBIT_EXPORT int32_t fewbit_solve_present() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

FEWBIT_EXPORT void fewbit_solve_compensate(const Panel* panel, const Element* element, int32_t threads) {
  for_each_tile((panel->rows + kWide - 1) / kWide, threads,
                [&](int64_t tile) { compensate(*panel, *element, tile * kWide); });
}

FEWBIT_EXPORT void fewbit_solve_errors(const Search* search, const Element* element, int32_t threads) {
  const int64_t tiles = (search->rows + kWide - 1) / kWide;
  const Nearest nearest(*element);
  for_each_tile(search->groups * tiles, threads,
                [&](int64_t item) { search_tile(*search, nearest, item / tiles, item % tiles * kWide); });
}
