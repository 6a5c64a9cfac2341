// Linear layers: the threads of a team put activations in order, then each multiplies its blocks of output features.
//
// Few tokens are multiplied in tiles, whose codes are decoded on the way, many by panels.
#pragma once

#include "dense.h"
#include "float_tile.h"
#include "inputs.h"
#include "integer_inputs.h"
#include "panel_linear.h"
#include "team.h"

namespace fewbit {
namespace {

// Activations that are in use at a time stay within this, about half of a second-level cache.
constexpr int64_t kInputBytes = 256 * 1024;

// Each kind of arithmetic has bytes() of a tile's activations and tiles_at_a_time(), place(tiles, tile, index, memory) for
// the tile of that index in the memory, and multiply(blocks, tiles, first, count, memory) for the tiles that are there.
template <class Arithmetic>
void run(const Arithmetic& arithmetic, int64_t tokens, Team& team, Range blocks) {
  const Tiles tiles(tokens, Arithmetic::kTile);
  const int64_t most = arithmetic.tiles_at_a_time(), chunk = most < 1 ? 1 : most < tiles.count ? most : tiles.count;
  char* memory = team.inputs(chunk * arithmetic.bytes());
  if (!memory) return;
  for (int64_t first = 0; first < tiles.count; first += chunk) {
    const int64_t count = tiles.count - first < chunk ? tiles.count - first : chunk;
    const Range mine = share(count, team.thread, team.count);
    if (first > 0) team.wait();
    team.guarded([&] {
      for (int64_t i = mine.begin; i < mine.end; ++i) arithmetic.place(tiles, first + i, i, memory);
    });
    team.wait();
    team.guarded([&] { arithmetic.multiply(blocks, tiles, first, count, memory); });
  }
}

template <class Vector, class Fields>
struct FloatArithmetic {
  static constexpr int kTile = Vector::kFloatTile;
  const Job& job;

  bool needs_sums() const { return Fields::kHasZero || job.weight.minima; }
  int64_t bytes() const {
    return whole_vectors((job.weight.slots() + (needs_sums() ? job.weight.groups : 0)) * kTile) * 4;
  }
  float* sums_of(float* inputs) const { return needs_sums() ? inputs + job.weight.slots() * kTile : nullptr; }

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = job.weight;
    float* inputs = reinterpret_cast<float*>(memory + index * bytes());
    float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 4));
    for (int token = 0; token < tiles.width(tile); ++token) {
      row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
      place_floats<Fields>(weight, row, tiles.width(tile), token, inputs, sums_of(inputs));
    }
  }

  int64_t tiles_at_a_time() const { return kInputBytes / bytes(); }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, char* memory) const {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) multiply(block, tiles, first, count, memory);
  }

  void multiply(int64_t block, const Tiles& tiles, int64_t first, int64_t count, char* memory) const {
    float totals[kTile * kBlockRows];
    for (int64_t tile = first; tile < first + count; ++tile, memory += bytes()) {
      float* inputs = reinterpret_cast<float*>(memory);
      with_width<kTile>(tiles.width(tile), [&](auto width) {
        float_tile<Vector, Fields, decltype(width)::value>(job.weight, block, inputs, sums_of(inputs), totals);
      });
      if (job.weight.minima) add_minima<Vector>(job.weight, block, tiles.width(tile), sums_of(inputs), totals);
      write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, nullptr);
    }
  }
};

template <class Vector>
void linear(const Job& job, Team& team, Range blocks) {
  with_fields<Vector>(job.weight.element, [&](auto fields) {
    using Fields = decltype(fields);
    if (job.tokens >= kPanelTokens) return run(WeightOnlyPanels<Vector, Fields>(job), job.tokens, team, blocks);
    run(FloatArithmetic<Vector, Fields>{job}, job.tokens, team, blocks);
  });
}

// Whether bf16_linear is worth its panels: groups that are shorter cost more than the products save.
inline bool takes_bf16_panels(const Job& job) {
  return job.tokens >= kPanelTokens && job.dtype == Dtype::kBf16 && !job.weight.minima && job.weight.group_slots >= 32;
}

template <class Vector>
void bf16_linear(const Job& job, Team& team, Range blocks) {
  with_fields<Vector>(job.weight.element, [&](auto fields) {
    run(Bf16Panels<Vector, decltype(fields)>(job), job.tokens, team, blocks);
  });
}

template <class Vector, class Products>
struct IntegerArithmetic {
  static constexpr int kTile = Vector::kIntegerTile;
  const Job& job;
  const Rounding& rounding;
  float common;  // the scale of all tokens, 0 where each has its own

  IntegerArithmetic(const Job& job, const Rounding& rounding)
      : job(job), rounding(rounding), common(common_scale<Vector>(job, rounding)) {}

  int64_t words() const { return job.weight.slots() / Products::kSlots * Products::kInputWords; }
  int64_t row_size() const { return whole_vectors(job.weight.columns); }
  int64_t row_bytes() const { return row_size() * 5 + whole_vectors(job.weight.slots()); }  // floats, codes, by slot
  int64_t bytes() const { return whole_vectors((words() + job.weight.groups + 1) * kTile) * 4; }  // and sums and scales

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = job.weight;
    memory += index * bytes();
    float* row = static_cast<float*>(scratch(Scratch::kRow, row_bytes()));
    int8_t* codes = reinterpret_cast<int8_t*>(row + row_size());
    int32_t* inputs = reinterpret_cast<int32_t*>(memory);
    float* scales = reinterpret_cast<float*>(inputs + (words() + weight.groups) * kTile);
    for (int token = 0; token < tiles.width(tile); ++token) {
      row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
      scales[token] = common > 0 ? common : scale_for(largest_of<Vector>(row, weight.columns), rounding);
      round_to_bytes<Vector>(row, weight.columns, scales[token], rounding, codes);
      place_codes<Products>(weight, codes, codes + row_size(), tiles.width(tile), token, inputs,
                            inputs + words() * kTile);
    }
  }

  int64_t tiles_at_a_time() const { return kInputBytes / bytes(); }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, char* memory) const {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) multiply(block, tiles, first, count, memory);
  }

  void multiply(int64_t block, const Tiles& tiles, int64_t first, int64_t count, char* memory) const {
    float totals[kTile * kBlockRows];
    for (int64_t tile = first; tile < first + count; ++tile, memory += bytes()) {
      const int32_t* inputs = reinterpret_cast<const int32_t*>(memory);
      const float* scales = reinterpret_cast<const float*>(inputs + (words() + job.weight.groups) * kTile);
      with_width<kTile>(tiles.width(tile), [&](auto width) {
        integer_tile<Vector, Products, decltype(width)::value>(job.weight, block, inputs, inputs + words() * kTile,
                                                               totals);
      });
      write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, scales);
    }
  }
};

template <class Vector>
void integer_linear(const Job& job, const Rounding& rounding, Team& team, Range blocks) {
  const bool bytes = job.weight.element == Element::kInt8;
  const auto use = [&](const auto& arithmetic) { run(arithmetic, job.tokens, team, blocks); };
  if constexpr (!Vector::kByteDotProducts) {
    if (bytes && job.tokens >= kPanelTokens) return use(IntegerPanels<Vector>(job, rounding));
  }
  bytes ? use(IntegerArithmetic<Vector, ByteProducts<Vector>>(job, rounding))
        : use(IntegerArithmetic<Vector, NibbleProducts<Vector>>(job, rounding));
}

// Plain weights. Few tokens are multiplied one after the other by every thread for its own blocks.
template <class Vector>
void dense(const Job& job, Team& team, Range blocks) {
  if (job.tokens >= kPanelTokens) return run(DensePanels<Vector>(job), job.tokens, team, blocks);
  team.guarded([&] { dense_blocks<Vector>(job, blocks); });
}

}  // namespace
}  // namespace fewbit
