// Linear layers for many tokens, by panels: weight only, of integers, and of a plain weight. Each has the parts that
// `linear.h` asks of an arithmetic.
#pragma once

#include "integer_inputs.h"
#include "panel.h"

namespace fewbit {
namespace {

// From so many tokens on decoding a panel pays off, and with so many it costs nearly nothing.
constexpr int64_t kPanelTokens = 24;
constexpr int64_t kPanelTokensAtATime = 256;

// Apart from one another by other than a power of two, which would put all tokens' inputs in the same lines of a cache.
inline int64_t input_stride(int64_t steps) { return whole_vectors(steps) + 16; }

// A row in the order of the weight's slots, padding zero.
template <class Number>
void place_slots(const Weight& weight, const Number* row, Number* slots) {
  std::memset(slots, 0, static_cast<size_t>(weight.slots()) * sizeof(Number));
  for (int64_t group = 0; group < weight.groups; ++group) {
    each_feature(weight, group, [&](int64_t slot, int64_t feature) { slots[slot] = row[feature]; });
  }
}

// What weight-only and plain weights share: inputs in float32, and sums of whole rows.
template <class Vector>
struct FloatPanels {
  static constexpr int kTile = Vector::kPanelTile;
  const Job& job;
  int64_t slots;

  int64_t bytes() const { return input_stride(slots) * kTile * 4; }
  int64_t tiles_at_a_time() const { return kPanelTokensAtATime / kTile; }

  // write(token, its inputs) for the tokens of a tile.
  template <class Write>
  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory, Write&& write) const {
    float* inputs = reinterpret_cast<float*>(memory) - tiles.first(tile - index) * input_stride(slots);
    for (int64_t token = tiles.first(tile); token < tiles.first(tile + 1); ++token) {
      write(token, inputs + token * input_stride(slots));
    }
  }

  // decode(block, stretch of slots, panel) for each block and stretch, and its sums for the tokens of the tiles.
  template <class Decode>
  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory,
                Decode&& decode) const {
    const int64_t first_token = tiles.first(first), tokens = tiles.first(first + count) - first_token;
    uint32_t* panels = static_cast<uint32_t*>(
        scratch(Scratch::kPanel, kPanelBlocks * (kPanelSteps + tokens) * kBlockRows * 4));
    uint32_t* sums = panels + kPanelBlocks * kPanelSteps * kBlockRows;
    for (int64_t begin = blocks.begin; begin < blocks.end; begin += kPanelBlocks) {
      const int64_t some = blocks.end - begin < kPanelBlocks ? blocks.end - begin : kPanelBlocks;
      for (int64_t slot = 0; slot < slots; slot += kPanelSteps) {
        const int64_t steps = slots - slot < kPanelSteps ? slots - slot : kPanelSteps;
        for (int64_t i = 0; i < some; ++i) {
          decode(begin + i, Range{slot, slot + steps}, reinterpret_cast<float*>(panels + i * steps * kBlockRows));
        }
        panel_tiles<Vector, FloatSteps<Vector>>(
            some, panels, steps, tokens, {reinterpret_cast<const uint32_t*>(memory) + slot, input_stride(slots)},
            {sums, kBlockRows}, slot == 0);
      }
      for (int64_t i = 0; i < some; ++i) {
        write_out<Vector>(job, begin + i, first_token, static_cast<int>(tokens),
                          reinterpret_cast<const float*>(sums + i * tokens * kBlockRows), nullptr);
      }
    }
  }
};

template <class Vector, class Fields>
struct WeightOnlyPanels : FloatPanels<Vector> {
  using FloatPanels<Vector>::job;

  explicit WeightOnlyPanels(const Job& job) : FloatPanels<Vector>{job, job.weight.slots()} {}

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = job.weight;
    float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 4));
    FloatPanels<Vector>::place(tiles, tile, index, memory, [&](int64_t token, float* inputs) {
      const bool in_order = !has_padding(weight);
      row_to_floats<Vector>(token_row(job, token), job.dtype, weight.columns, in_order ? inputs : row);
      if (!in_order) place_slots(weight, row, inputs);
    });
  }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory) const {
    FloatPanels<Vector>::multiply(blocks, tiles, first, count, memory, [&](int64_t block, Range slots, float* panel) {
      float_panel<Vector, Fields>(job.weight, block, slots, panel);
    });
  }
};

template <class Vector>
struct DensePanels : FloatPanels<Vector> {
  using FloatPanels<Vector>::job;

  explicit DensePanels(const Job& job) : FloatPanels<Vector>{job, job.weight.columns} {}

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    FloatPanels<Vector>::place(tiles, tile, index, memory, [&](int64_t token, float* inputs) {
      row_to_floats<Vector>(token_row(job, token), job.dtype, job.weight.columns, inputs);
    });
  }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory) const {
    FloatPanels<Vector>::multiply(blocks, tiles, first, count, memory, [&](int64_t block, Range features, float* panel) {
      const int64_t row = block * kBlockRows, stride = job.weight.columns * bytes_of(job.dtype);
      const char* from = reinterpret_cast<const char*>(job.weight.words) + features.begin * bytes_of(job.dtype);
      rows_panel<Vector>(from + row * stride, stride, job.weight.rows - row, features.end - features.begin, job.dtype,
                         panel);
    });
  }
};

// What panels of pairs share: inputs of two features to a step, and sums of each group, brought under its scales in
// float32.
template <class Vector, class Steps>
struct PairPanels {
  static constexpr int kTile = Vector::kPanelTile;
  const Job& job;

  // The last word of a token's inputs, which are shorter, is room for its scale.
  int64_t stride() const { return input_stride(job.weight.slots() / 2); }
  int64_t bytes() const { return stride() * kTile * 4; }
  int64_t tiles_at_a_time() const { return kPanelTokensAtATime / kTile; }

  // write(token, its inputs) for the tokens of a tile.
  template <class Write>
  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory, Write&& write) const {
    for (int64_t token = tiles.first(tile); token < tiles.first(tile + 1); ++token) {
      write(token, reinterpret_cast<uint32_t*>(memory) + (token - tiles.first(tile - index)) * stride());
    }
  }

  // decode(block, group, stretch of its slots, panel) for each of them, and the sums for the tokens of the tiles.
  template <class Decode>
  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory, bool scaled,
                Decode&& decode) const {
    const int64_t first_token = tiles.first(first), tokens = tiles.first(first + count) - first_token;
    const int64_t size = tokens * kBlockRows;  // of a block's sums
    const uint32_t* inputs = reinterpret_cast<const uint32_t*>(memory);
    uint32_t* panels = static_cast<uint32_t*>(
        scratch(Scratch::kPanel, (kPanelBlocks * (kPanelSteps * kBlockRows + 2 * size) + tokens) * 4));
    uint32_t* sums = panels + kPanelBlocks * kPanelSteps * kBlockRows;
    float *totals = reinterpret_cast<float*>(sums + kPanelBlocks * size), *scales = totals + kPanelBlocks * size;
    for (int64_t token = 0; token < tokens; ++token) {
      std::memcpy(scales + token, inputs + (token + 1) * stride() - 1, sizeof *scales);
    }
    for (int64_t begin = blocks.begin; begin < blocks.end; begin += kPanelBlocks) {
      const Range some{begin, begin + kPanelBlocks < blocks.end ? begin + kPanelBlocks : blocks.end};
      std::memset(totals, 0, static_cast<size_t>(kPanelBlocks * size) * 4);
      for (int64_t group = 0; group < job.weight.groups; ++group) {
        sum_group(some, group, tokens, inputs, panels, sums, decode);
        for (int64_t i = 0; i < some.end - begin; ++i) {
          add_scaled(begin + i, group, tokens, sums + i * size, totals + i * size);
        }
      }
      for (int64_t i = 0; i < some.end - begin; ++i) {
        write_out<Vector>(job, begin + i, first_token, static_cast<int>(tokens), totals + i * size,
                          scaled ? scales : nullptr);
      }
    }
  }

 private:
  template <class Decode>
  void sum_group(Range blocks, int64_t group, int64_t tokens, const uint32_t* inputs, uint32_t* panels, uint32_t* sums,
                 Decode&& decode) const {
    const Weight& weight = job.weight;
    for (int64_t slot = 0; slot < weight.group_slots; slot += 2 * kPanelSteps) {
      const int64_t left = weight.group_slots - slot;
      const int64_t steps = left < 2 * kPanelSteps ? left / 2 : kPanelSteps;
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        decode(block, group, Range{slot, slot + 2 * steps}, panels + (block - blocks.begin) * steps * kBlockRows);
      }
      panel_tiles<Vector, Steps>(blocks.end - blocks.begin, panels, steps, tokens,
                                 {inputs + (group * weight.group_slots + slot) / 2, stride()}, {sums, kBlockRows},
                                 slot == 0);
    }
  }

  void add_scaled(int64_t block, int64_t group, int64_t tokens, const uint32_t* sums, float* totals) const {
    for (int part = 0; part < kParts<Vector>; ++part) {
      const auto scale = scales_of<Vector>(job.weight, block, group, part);
      for (int64_t at = part * Vector::kLanes; at < tokens * kBlockRows; at += kBlockRows) {
        const auto sum = Steps::to_floats(Steps::load(sums + at));
        Vector::store(totals + at, Vector::multiply_add(scale, sum, Vector::load_floats(totals + at)));
      }
    }
  }
};

// Bytes under integers, for CPUs without byte dot products. Sums are exact.
template <class Vector>
struct IntegerPanels : PairPanels<Vector, PairSteps<Vector>> {
  using Base = PairPanels<Vector, PairSteps<Vector>>;
  using Base::job;
  const Rounding& rounding;
  float common;  // the scale of all tokens, 0 where each has its own

  IntegerPanels(const Job& job, const Rounding& rounding)
      : Base{job}, rounding(rounding), common(common_scale<Vector>(job, rounding)) {}

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = job.weight;
    float* row = static_cast<float*>(scratch(Scratch::kRow, whole_vectors(weight.columns) * 6));
    int16_t* codes = reinterpret_cast<int16_t*>(row + whole_vectors(weight.columns));
    Base::place(tiles, tile, index, memory, [&](int64_t token, uint32_t* inputs) {
      const bool in_order = !has_padding(weight);
      int16_t* slots = reinterpret_cast<int16_t*>(inputs);
      row_to_floats<Vector>(token_row(job, token), job.dtype, weight.columns, row);
      const float scale = common > 0 ? common : scale_for(largest_of<Vector>(row, weight.columns), rounding);
      round_to_halves<Vector>(row, weight.columns, scale, rounding, in_order ? slots : codes);
      if (!in_order) place_slots(weight, codes, slots);
      std::memcpy(inputs + Base::stride() - 1, &scale, sizeof scale);
    });
  }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory) const {
    Base::multiply(blocks, tiles, first, count, memory, true,
                   [&](int64_t block, int64_t group, Range slots, uint32_t* panel) {
                     pair_panel<Vector>(job.weight, block, group, slots, panel);
                   });
  }
};

// Any codes under bf16 as it is, for CPUs with bf16 dot products.
template <class Vector, class Fields>
struct Bf16Panels : PairPanels<Vector, Bf16Steps<Vector>> {
  using Base = PairPanels<Vector, Bf16Steps<Vector>>;
  using Base::job;

  explicit Bf16Panels(const Job& job) : Base{job} {}

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    Base::place(tiles, tile, index, memory, [&](int64_t token, uint32_t* inputs) {
      const uint16_t* row = static_cast<const uint16_t*>(token_row(job, token));
      if (has_padding(job.weight)) return place_slots(job.weight, row, reinterpret_cast<uint16_t*>(inputs));
      std::memcpy(inputs, row, static_cast<size_t>(job.weight.columns) * sizeof *row);
    });
  }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory) const {
    Base::multiply(blocks, tiles, first, count, memory, false,
                   [&](int64_t block, int64_t group, Range slots, uint32_t* panel) {
                     bf16_panel<Vector, Fields>(job.weight, block, group, slots, panel);
                   });
  }
};

}  // namespace
}  // namespace fewbit
