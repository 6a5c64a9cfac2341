// A whole call: activations are put in order, then each thread multiplies its blocks of output features. Or, where the
// caller has divided the blocks already, some of them on the calling thread.
#pragma once

#include "dense.h"
#include "float_tile.h"
#include "inputs.h"
#include "integer_inputs.h"

namespace fewbit {
namespace {

// Activations that are in use at a time stay within this, about half of a second-level cache.
constexpr int64_t kInputBytes = 256 * 1024;
// Below so many products a second thread costs more than it brings.
constexpr int64_t kProductsPerThread = 1 << 17;

inline int useful_threads(const Job& job) {
  const int64_t products = job.weight.blocks() * kBlockRows * job.weight.slots() * job.tokens;
  const int64_t useful = products / kProductsPerThread;
  return useful < 1 ? 1 : useful < job.threads ? static_cast<int>(useful) : job.threads;
}

// Cuts the tokens into tiles and runs them in chunks whose activations fit the cache: place(tile, index within the
// chunk) for each tile, then multiply(block, tile, index) for each block and tile.
template <class Place, class Multiply>
void run_tiles(const Job& job, const Tiles& tiles, int64_t chunk, Place&& place, Multiply&& multiply) {
  const int threads = useful_threads(job);
  for (int64_t first = 0; first < tiles.count; first += chunk) {
    const int64_t count = tiles.count - first < chunk ? tiles.count - first : chunk;
    if (count == 1) {
      place(first, 0);
    } else {
      parallel_for_thread(threads, [&](int thread, int thread_count) {
        const Range range = share(count, thread, thread_count);
        for (int64_t i = range.begin; i < range.end; ++i) place(first + i, i);
      });
    }
    parallel_for_thread(threads, [&](int thread, int thread_count) {
      const Range range = share(job.weight.blocks(), thread, thread_count);
      for (int64_t block = range.begin; block < range.end; ++block) {
        for (int64_t i = 0; i < count; ++i) multiply(block, first + i, i);
      }
    });
  }
}

inline int64_t tiles_at_a_time(const Tiles& tiles, int64_t bytes_per_tile) {
  const int64_t fitting = kInputBytes / bytes_per_tile;
  return fitting < 1 ? 1 : fitting < tiles.count ? fitting : tiles.count;
}

// Both kinds of arithmetic have the same three parts: bytes() of a tile's activations, place(tile, inputs) and
// multiply(block, tile, inputs).
template <class Arithmetic>
void run_whole(const Job& job, const Arithmetic& arithmetic) {
  const Tiles tiles(job.tokens, Arithmetic::kTile);
  const int64_t bytes = arithmetic.bytes(), chunk = tiles_at_a_time(tiles, bytes);
  char* memory = static_cast<char*>(scratch(Scratch::kInputs, chunk * bytes));
  run_tiles(
      job, tiles, chunk, [&](int64_t tile, int64_t index) { arithmetic.place(tiles, tile, memory + index * bytes); },
      [&](int64_t block, int64_t tile, int64_t index) {
        arithmetic.multiply(block, tiles, tile, memory + index * bytes);
      });
}

template <class Arithmetic>
void run_some(const Job& job, const Arithmetic& arithmetic, Range blocks) {
  const Tiles tiles(job.tokens, Arithmetic::kTile);
  char* inputs = static_cast<char*>(scratch(Scratch::kInputs, arithmetic.bytes()));
  for (int64_t tile = 0; tile < tiles.count; ++tile) {
    arithmetic.place(tiles, tile, inputs);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) arithmetic.multiply(block, tiles, tile, inputs);
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

  void place(const Tiles& tiles, int64_t tile, char* memory) const {
    const Weight& weight = job.weight;
    float* inputs = reinterpret_cast<float*>(memory);
    float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 4));
    for (int token = 0; token < tiles.width(tile); ++token) {
      row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
      place_floats<Fields>(weight, row, tiles.width(tile), token, inputs, sums_of(inputs));
    }
  }

  void multiply(int64_t block, const Tiles& tiles, int64_t tile, char* memory) const {
    float totals[kTile * kBlockRows];
    float* inputs = reinterpret_cast<float*>(memory);
    with_width<kTile>(tiles.width(tile), [&](auto width) {
      float_tile<Vector, Fields, decltype(width)::value>(job.weight, block, inputs, sums_of(inputs), totals);
    });
    if (job.weight.minima) add_minima<Vector>(job.weight, block, tiles.width(tile), sums_of(inputs), totals);
    write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, nullptr);
  }
};

template <class Vector>
void linear(const Job& job) {
  with_fields<Vector>(job.weight.element,
                      [&](auto fields) { run_whole(job, FloatArithmetic<Vector, decltype(fields)>{job}); });
}

template <class Vector>
void linear_blocks(const Job& job, Range blocks) {
  with_fields<Vector>(job.weight.element,
                      [&](auto fields) { run_some(job, FloatArithmetic<Vector, decltype(fields)>{job}, blocks); });
}

// The largest magnitude of all tokens, where one dynamic scale covers them.
template <class Vector>
float largest_of_all(const Job& job, float* row) {
  float largest = 0;
  for (int64_t token = 0; token < job.tokens; ++token) {
    row_to_floats<Vector>(token_row(job, token), job.dtype, job.weight.columns, row);
    const float found = largest_of<Vector>(row, job.weight.columns);
    largest = found > largest ? found : largest;
  }
  return largest;
}

template <class Vector, class Products>
struct IntegerArithmetic {
  static constexpr int kTile = Vector::kIntegerTile;
  const Job& job;
  const Rounding& rounding;
  float common;  // the scale of all tokens, 0 where each has its own

  IntegerArithmetic(const Job& job, const Rounding& rounding)
      : job(job), rounding(rounding), common(rounding.stored_scale ? *rounding.stored_scale : 0) {
    if (!rounding.stored_scale && !rounding.per_token) {
      common = scale_for(largest_of_all<Vector>(job, static_cast<float*>(scratch(Scratch::kRow, row_bytes()))),
                         rounding);
    }
  }

  int64_t words() const { return job.weight.slots() / Products::kSlots * Products::kInputWords; }
  int64_t row_size() const { return whole_vectors(job.weight.columns); }
  int64_t row_bytes() const { return row_size() * 5 + whole_vectors(job.weight.slots()); }  // floats, codes, by slot
  int64_t bytes() const { return whole_vectors((words() + job.weight.groups + 1) * kTile) * 4; }  // and sums and scales

  void place(const Tiles& tiles, int64_t tile, char* memory) const {
    const Weight& weight = job.weight;
    float* row = static_cast<float*>(scratch(Scratch::kRow, row_bytes()));
    int8_t* codes = reinterpret_cast<int8_t*>(row + row_size());
    int32_t* inputs = reinterpret_cast<int32_t*>(memory);
    float* scales = reinterpret_cast<float*>(inputs + (words() + weight.groups) * kTile);
    for (int token = 0; token < tiles.width(tile); ++token) {
      row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
      scales[token] = common > 0 ? common : scale_for(largest_of<Vector>(row, weight.columns), rounding);
      round_row<Vector>(row, weight.columns, scales[token], rounding, codes);
      place_codes<Products>(weight, codes, codes + row_size(), tiles.width(tile), token, inputs,
                            inputs + words() * kTile);
    }
  }

  void multiply(int64_t block, const Tiles& tiles, int64_t tile, char* memory) const {
    float totals[kTile * kBlockRows];
    const int32_t* inputs = reinterpret_cast<const int32_t*>(memory);
    const float* scales = reinterpret_cast<const float*>(inputs + (words() + job.weight.groups) * kTile);
    with_width<kTile>(tiles.width(tile), [&](auto width) {
      integer_tile<Vector, Products, decltype(width)::value>(job.weight, block, inputs, inputs + words() * kTile,
                                                             totals);
    });
    write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, scales);
  }
};

// Calls visit with the arithmetic of the weight's width.
template <class Vector, class Visit>
void with_integers(const Job& job, const Rounding& rounding, Visit&& visit) {
  if (job.weight.element == Element::kInt8) {
    return visit(IntegerArithmetic<Vector, ByteProducts<Vector>>(job, rounding));
  }
  visit(IntegerArithmetic<Vector, NibbleProducts<Vector>>(job, rounding));
}

template <class Vector>
void integer_linear(const Job& job, const Rounding& rounding) {
  with_integers<Vector>(job, rounding, [&](const auto& arithmetic) { run_whole(job, arithmetic); });
}

template <class Vector>
void integer_linear_blocks(const Job& job, const Rounding& rounding, Range blocks) {
  with_integers<Vector>(job, rounding, [&](const auto& arithmetic) { run_some(job, arithmetic, blocks); });
}

}  // namespace
}  // namespace fewbit
