// A whole call: activations are put in order, then each thread multiplies its blocks of output features.
#pragma once

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

inline const void* token_row(const Job& job, int64_t token) {
  return static_cast<const char*>(job.x) + token * job.weight.columns * bytes_of(job.dtype);
}

template <class Vector, class Fields>
void float_linear(const Job& job) {
  const Weight& weight = job.weight;
  const Tiles tiles(job.tokens, Vector::kFloatTile);
  const bool needs_sums = Fields::kHasZero || weight.minima;
  const int64_t tile_size = whole_vectors((weight.slots() + (needs_sums ? weight.groups : 0)) * Vector::kFloatTile);
  const int64_t chunk = tiles_at_a_time(tiles, tile_size * 4);
  float* memory = static_cast<float*>(scratch(Scratch::kInputs, chunk * tile_size * 4));
  const auto sums_of = [&](float* inputs) {
    return needs_sums ? inputs + weight.slots() * Vector::kFloatTile : nullptr;
  };
  run_tiles(
      job, tiles, chunk,
      [&](int64_t tile, int64_t index) {
        float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 4));
        float* inputs = memory + index * tile_size;
        for (int token = 0; token < tiles.width(tile); ++token) {
          row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
          place_floats<Fields>(weight, row, tiles.width(tile), token, inputs, sums_of(inputs));
        }
      },
      [&](int64_t block, int64_t tile, int64_t index) {
        float totals[Vector::kFloatTile * kBlockRows];
        float* inputs = memory + index * tile_size;
        with_width<Vector::kFloatTile>(tiles.width(tile), [&](auto width) {
          float_tile<Vector, Fields, decltype(width)::value>(weight, block, inputs, sums_of(inputs), totals);
        });
        if (weight.minima) add_minima<Vector>(weight, block, tiles.width(tile), sums_of(inputs), totals);
        write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, nullptr);
      });
}

template <class Vector>
void linear(const Job& job) {
  with_fields<Vector>(job.weight.element, [&](auto fields) { float_linear<Vector, decltype(fields)>(job); });
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
void integer_linear_with(const Job& job, const Rounding& rounding) {
  constexpr int kTile = Vector::kIntegerTile;
  const Weight& weight = job.weight;
  const Tiles tiles(job.tokens, kTile);
  const int64_t words = weight.slots() / Products::kSlots * Products::kInputWords;
  const int64_t tile_size = whole_vectors((words + weight.groups + 1) * kTile);  // inputs, their sums, their scales
  const int64_t chunk = tiles_at_a_time(tiles, tile_size * 4);
  int32_t* memory = static_cast<int32_t*>(scratch(Scratch::kInputs, chunk * tile_size * 4));
  const int64_t row_size = whole_vectors(weight.columns);
  const int64_t row_bytes = row_size * 5 + whole_vectors(weight.slots());  // floats, codes, codes by slot
  float common = rounding.stored_scale ? *rounding.stored_scale : 0;
  if (!rounding.stored_scale && !rounding.per_token) {
    common = scale_for(largest_of_all<Vector>(job, static_cast<float*>(scratch(Scratch::kRow, row_bytes))), rounding);
  }
  run_tiles(
      job, tiles, chunk,
      [&](int64_t tile, int64_t index) {
        float* row = static_cast<float*>(scratch(Scratch::kRow, row_bytes));
        int8_t* codes = reinterpret_cast<int8_t*>(row + row_size);
        int32_t* inputs = memory + index * tile_size;
        float* scales = reinterpret_cast<float*>(inputs + (words + weight.groups) * kTile);
        for (int token = 0; token < tiles.width(tile); ++token) {
          row_to_floats<Vector>(token_row(job, tiles.first(tile) + token), job.dtype, weight.columns, row);
          scales[token] = common > 0 ? common : scale_for(largest_of<Vector>(row, weight.columns), rounding);
          round_row<Vector>(row, weight.columns, scales[token], rounding, codes);
          place_codes<Products>(weight, codes, codes + row_size, tiles.width(tile), token, inputs,
                                inputs + words * kTile);
        }
      },
      [&](int64_t block, int64_t tile, int64_t index) {
        float totals[kTile * kBlockRows];
        const int32_t* inputs = memory + index * tile_size;
        const float* scales = reinterpret_cast<const float*>(inputs + (words + weight.groups) * kTile);
        with_width<kTile>(tiles.width(tile), [&](auto width) {
          integer_tile<Vector, Products, decltype(width)::value>(weight, block, inputs, inputs + words * kTile, totals);
        });
        write_out<Vector>(job, block, tiles.first(tile), tiles.width(tile), totals, scales);
      });
}

template <class Vector>
void integer_linear(const Job& job, const Rounding& rounding) {
  if (job.weight.element == Element::kInt8) return integer_linear_with<Vector, ByteProducts<Vector>>(job, rounding);
  integer_linear_with<Vector, NibbleProducts<Vector>>(job, rounding);
}

}  // namespace
}  // namespace fewbit
