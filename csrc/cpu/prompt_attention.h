// Several query positions over a cache of keys and values, each seeing those up to itself. Scores and weighted values are
// products of panels; softmax is that of one position, `kScoresAtATime` keys at a time.
#pragma once

#include "attention.h"
#include "panel.h"
#include "threads.h"

namespace fewbit {
namespace {

// Rows of a strip, one for each query position and head, so that their scores fit a second-level cache.
constexpr int64_t kStripRows = 192;

// The heads that read one key head, at some positions. `queries` is [tokens][heads_stride numbers], rotated, of the first
// of these heads; `to` likewise.
struct Strip {
  CacheHead head;
  int64_t position, tokens, group;
  const char* queries;
  char* to;
  int64_t heads_stride;

  int64_t rows() const { return tokens * group; }
  int64_t at(int64_t row) const {
    return (row / group * heads_stride + row % group * head.head_dim) * bytes_of(head.dtype);
  }
};

template <class Vector>
class StripAttention {
 public:
  explicit StripAttention(const Strip& strip)
      : strip_(strip), size_(strip.head.head_dim), query_stride_(size_ + 16), part_size_(part_size(size_)) {
    const int64_t steps = size_ > kScoresAtATime ? size_ : kScoresAtATime;
    queries_ = static_cast<float*>(scratch(
        Scratch::kPanel,
        (strip.rows() * (query_stride_ + kScoreStride + part_size_) + steps * kBlockRows + whole_vectors(size_)) * 4));
    scores_ = queries_ + strip.rows() * query_stride_;
    parts_ = scores_ + strip.rows() * kScoreStride;
    panel_ = parts_ + strip.rows() * part_size_;
    row_ = panel_ + steps * kBlockRows;
  }

  void run() {
    place_queries();
    const int64_t end = strip_.position + strip_.tokens;
    for (int64_t t = 0; t < end; t += kScoresAtATime) {
      const Range positions{t, t + kScoresAtATime < end ? t + kScoresAtATime : end};
      // Rows before these see none of the positions.
      const int64_t first = first_row(positions.begin);
      score(positions);
      for (int64_t row = first; row < strip_.rows(); ++row) weigh_row(positions, row);
      add(positions, first);
    }
    for (int64_t row = 0; row < strip_.rows(); ++row) {
      join_parts<Vector>(parts_ + row * part_size_, 0, 1, size_, row_, strip_.to + strip_.at(row), strip_.head.dtype);
    }
  }

 private:
  static constexpr int64_t kScoreStride = kScoresAtATime + 16;

  int64_t first_row(int64_t position) const {
    return position <= strip_.position ? 0 : (position - strip_.position) * strip_.group;
  }

  static const uint32_t* words(const float* numbers) { return reinterpret_cast<const uint32_t*>(numbers); }
  static uint32_t* words(float* numbers) { return reinterpret_cast<uint32_t*>(numbers); }

  void place_queries() {
    const auto scale = Vector::broadcast(strip_.head.scale);
    for (int64_t row = 0; row < strip_.rows(); ++row) {
      float *query = queries_ + row * query_stride_, *part = parts_ + row * part_size_;
      row_to_floats<Vector>(strip_.queries + strip_.at(row), strip_.head.dtype, size_, query);
      for (int64_t d = 0; d < size_; d += Vector::kLanes) {
        Vector::store(query + d, Vector::multiply(Vector::load_floats(query + d), scale));
      }
      std::memset(part, 0, static_cast<size_t>(part_size_) * 4);
      part[size_] = -INFINITY;
    }
  }

  void score(Range positions) {
    const int64_t stride = size_ * bytes_of(strip_.head.dtype);
    for (int64_t t = positions.begin; t < positions.end; t += kBlockRows) {
      const int64_t first = first_row(t);
      rows_panel<Vector>(strip_.head.keys + t * stride, stride, positions.end - t, size_, strip_.head.dtype, panel_);
      panel_tiles<Vector, FloatSteps<Vector>>(
          1, words(panel_), size_, strip_.rows() - first, {words(queries_ + first * query_stride_), query_stride_},
          {words(scores_ + first * kScoreStride + t - positions.begin), kScoreStride}, true);
    }
  }

  void weigh_row(Range positions, int64_t row) {
    float* scores = scores_ + row * kScoreStride;
    const int64_t seen = strip_.position + row / strip_.group + 1 - positions.begin;
    const int64_t all = positions.end - positions.begin, count = seen < all ? seen : all;
    weigh<Vector>(scores, count, parts_ + row * part_size_, size_);
    std::memset(scores + count, 0, static_cast<size_t>(all - count) * 4);
  }

  void add(Range positions, int64_t first) {
    const Dtype dtype = strip_.head.dtype;
    for (int64_t d = 0; d < size_; d += kBlockRows) {
      float* to = panel_;
      for (int64_t t = positions.begin; t < positions.end; ++t, to += kBlockRows) {
        row_to_floats<Vector>(strip_.head.values + (t * size_ + d) * bytes_of(dtype), dtype, kBlockRows, to);
      }
      panel_tiles<Vector, FloatSteps<Vector>>(1, words(panel_), positions.end - positions.begin, strip_.rows() - first,
                                              {words(scores_ + first * kScoreStride), kScoreStride},
                                              {words(parts_ + first * part_size_ + d), part_size_}, false);
    }
  }

  const Strip& strip_;
  const int64_t size_, query_stride_, part_size_;
  float *queries_, *scores_, *parts_;  // a row for each head of each position
  float *panel_, *row_;
};

}  // namespace
}  // namespace fewbit
