// One query position over a cache of keys and values, divided among threads by positions: each thread keeps sums of its
// own positions under its own maximum (a part), which `join_parts` brings together.
#pragma once

#include "rows.h"

namespace fewbit {
namespace {

// Heads that read one key head at a time, and positions whose scores are kept at a time.
constexpr int kQueryTile = 4;
constexpr int64_t kScoresAtATime = 256;

// What a thread found for one head: head_dim sums, the largest score and the sum of weights under it.
inline int64_t part_size(int64_t head_dim) { return whole_vectors(head_dim + 2); }

struct CacheHead {
  const char *keys, *values;  // [capacity][head_dim]
  int64_t head_dim;
  float scale;
  Dtype dtype;
};

// scores[width][kScoresAtATime] of positions [begin, end). `queries` is [width][head_dim].
template <class Vector, int width>
void scores_of(const CacheHead& head, Range positions, const float* queries, float* scores) {
  for (int64_t t = positions.begin; t < positions.end; ++t) {
    const char* key = head.keys + t * head.head_dim * bytes_of(head.dtype);
    typename Vector::Floats sums[width];
    unroll<width>([&](auto i) FEWBIT_LAMBDA { sums[i] = Vector::zero(); });
    for (int64_t d = 0; d < head.head_dim; d += Vector::kLanes) {
      const auto k = load_as_floats<Vector>(key + d * bytes_of(head.dtype), head.dtype);
      unroll<width>([&](auto i) FEWBIT_LAMBDA {
        sums[i] = Vector::multiply_add(k, Vector::load_floats(queries + i * head.head_dim + d), sums[i]);
      });
    }
    unroll<width>([&](auto i) FEWBIT_LAMBDA {
      scores[i * kScoresAtATime + t - positions.begin] = Vector::sum(sums[i]) * head.scale;
    });
  }
}

// Scores to weights under the largest of them and of those before; `part` is brought under the new maximum. `scores` has
// room for whole vectors.
template <class Vector>
void weigh(float* scores, int64_t count, float* part, int64_t head_dim) {
  for (int64_t t = count; t < whole_vectors(count); ++t) scores[t] = -INFINITY;
  auto most = Vector::broadcast(part[head_dim]);
  for (int64_t t = 0; t < count; t += Vector::kLanes) most = Vector::larger(most, Vector::load_floats(scores + t));
  const float largest = Vector::largest(most), factor = std::exp(part[head_dim] - largest);
  const auto shift = Vector::broadcast(largest), one = Vector::broadcast(1.0f);
  auto sum = Vector::zero();
  for (int64_t t = 0; t < count; t += Vector::kLanes) {
    const auto weight = exponential<Vector>(Vector::subtract_product(Vector::load_floats(scores + t), shift, one));
    Vector::store(scores + t, weight);
    sum = Vector::add(sum, weight);  // padding adds 2**-125 each, which is lost
  }
  for (int64_t d = 0; d < head_dim; d += Vector::kLanes) {
    Vector::store(part + d, Vector::multiply(Vector::load_floats(part + d), Vector::broadcast(factor)));
  }
  part[head_dim] = largest;
  part[head_dim + 1] = part[head_dim + 1] * factor + Vector::sum(sum);
}

// Adds the weighted values of positions to the parts of `width` heads, two vectors of features at a time.
template <class Vector, int width>
void add_values(const CacheHead& head, Range positions, const float* weights, float* parts) {
  constexpr int kVectors = 16 / Vector::kLanes == 2 ? 2 : 1;
  const int64_t size = part_size(head.head_dim);
  for (int64_t d = 0; d < head.head_dim; d += kVectors * Vector::kLanes) {
    typename Vector::Floats sums[width][kVectors];
    unroll<width>([&](auto i) FEWBIT_LAMBDA {
      unroll<kVectors>([&](auto v) FEWBIT_LAMBDA {
        sums[i][v] = Vector::load_floats(parts + i * size + d + v * Vector::kLanes);
      });
    });
    for (int64_t t = positions.begin; t < positions.end; ++t) {
      const char* value = head.values + (t * head.head_dim + d) * bytes_of(head.dtype);
      typename Vector::Floats values[kVectors];
      unroll<kVectors>([&](auto v) FEWBIT_LAMBDA {
        values[v] = load_as_floats<Vector>(value + v * Vector::kLanes * bytes_of(head.dtype), head.dtype);
      });
      unroll<width>([&](auto i) FEWBIT_LAMBDA {
        const auto weight = Vector::broadcast(weights + i * kScoresAtATime + t - positions.begin);
        unroll<kVectors>([&](auto v) FEWBIT_LAMBDA {
          sums[i][v] = Vector::multiply_add(values[v], weight, sums[i][v]);
        });
      });
    }
    unroll<width>([&](auto i) FEWBIT_LAMBDA {
      unroll<kVectors>([&](auto v) FEWBIT_LAMBDA {
        Vector::store(parts + i * size + d + v * Vector::kLanes, sums[i][v]);
      });
    });
  }
}

// The parts of `count` heads that read one key head, over a thread's positions.
template <class Vector>
void attend(const CacheHead& head, Range positions, const float* queries, int64_t count, float* parts) {
  const int64_t size = part_size(head.head_dim);
  for (int64_t i = 0; i < count; ++i) {
    std::memset(parts + i * size, 0, static_cast<size_t>(size) * 4);
    parts[i * size + head.head_dim] = -INFINITY;
  }
  alignas(64) float scores[kQueryTile * kScoresAtATime];
  for (int64_t first = 0; first < count; first += kQueryTile) {
    const int64_t left = count - first, wide = left < kQueryTile ? left : kQueryTile;
    const float* own = queries + first * head.head_dim;
    float* part = parts + first * size;
    for (int64_t t = positions.begin; t < positions.end; t += kScoresAtATime) {
      const Range some{t, t + kScoresAtATime < positions.end ? t + kScoresAtATime : positions.end};
      with_width<kQueryTile>(static_cast<int>(wide), [&](auto width) {
        constexpr int kWidth = decltype(width)::value;
        scores_of<Vector, kWidth>(head, some, own, scores);
        for (int i = 0; i < kWidth; ++i) {
          weigh<Vector>(scores + i * kScoresAtATime, some.end - some.begin, part + i * size, head.head_dim);
        }
        add_values<Vector, kWidth>(head, some, scores, part);
      });
    }
  }
}

// One head's output [head_dim] from the parts of all threads, `stride` floats apart; `row` is room for it in float32.
template <class Vector>
void join_parts(const float* part, int64_t stride, int threads, int64_t head_dim, float* row, void* to, Dtype dtype) {
  float largest = -INFINITY, total = 0;
  for (int i = 0; i < threads; ++i) largest = std::fmax(largest, part[i * stride + head_dim]);
  std::memset(row, 0, static_cast<size_t>(head_dim) * 4);
  for (int i = 0; i < threads; ++i, part += stride) {
    const float weight = std::exp(part[head_dim] - largest);
    total += weight * part[head_dim + 1];
    for (int64_t d = 0; d < head_dim; d += Vector::kLanes) {
      const auto sum = Vector::load_floats(row + d);
      Vector::store(row + d, Vector::multiply_add(Vector::load_floats(part + d), Vector::broadcast(weight), sum));
    }
  }
  for (int64_t d = 0; d < head_dim; d += Vector::kLanes) {
    const auto mean = Vector::divide(Vector::load_floats(row + d), Vector::broadcast(total));
    store_from_floats<Vector>(static_cast<char*>(to) + d * bytes_of(dtype), dtype, mean);
  }
}

}  // namespace
}  // namespace fewbit
