// Linear layers for many tokens by AMX: W8A8 and W4A8 with exact sums of bytes, any codes under bf16 with products of bf16.
// A block's codes become a panel once, unless they lie as one, and the panel multiplies tile after tile of tokens. Each
// group's sums come under its scales in float32. The classes have the parts that `linear.h` asks of an arithmetic.
#pragma once

#include "amx.h"
#include "amx_panel.h"
#include "linear.h"

namespace fewbit {
namespace {

// From so many tokens on AMX pays off, from more where groups are short, whose sums have to leave the registers each time.
constexpr int64_t kAmxTokens = 4;
constexpr int64_t kAmxTokensTimesGroup = 512;
// The same for a plain weight, whose rows have to be woven into panels; of so few columns that words of a block have
// places in 32 bits.
constexpr int64_t kAmxDenseTokens = 16;
constexpr int64_t kAmxDenseColumns = 1 << 27;
// Inputs that are in use at a time stay within this, most of a second-level cache of the CPUs that have AMX.
constexpr int64_t kAmxInputBytes = 1280 * 1024;
// The registers hold the sums of two blocks by two tiles of tokens.
constexpr int kAmxBlocks = 2;
constexpr int kAmxTiles = 2;
// Panels of so many steps, and so many of them at a time, stay in the first-level cache beside two tiles' inputs.
constexpr int64_t kAmxSteps = 8;
constexpr int kAmxPanels = 2;

// A step is what one instruction multiplies: up to 64 bytes of each token. All steps of a call have the same size, so
// that the registers are configured once; the last of a group may be padded with zeros.
struct AmxSteps {
  int64_t of_group, bytes, count;

  AmxSteps(const Weight& weight, int64_t slot_bytes)
      : of_group((weight.group_slots * slot_bytes + kTileRowBytes - 1) / kTileRowBytes),
        bytes((weight.group_slots * slot_bytes + 4 * of_group - 1) / (4 * of_group) * 4),
        count(weight.groups * of_group) {}

  int64_t rows() const { return bytes / 4; }  // of a panel
  int64_t tile_bytes() const { return kTileRows * bytes; }

  // Steps that are multiplied in one go: whole groups, or a part of one.
  Range stretch(int64_t first) const {
    const int64_t size = of_group <= kAmxSteps ? kAmxSteps / of_group * of_group : kAmxSteps;
    const int64_t end = of_group <= kAmxSteps ? count : (first / of_group + 1) * of_group;
    return {first, first + size < end ? first + size : end};
  }

  // Registers 0 to 3 are of sums, 4 and 5 of the inputs of that many tokens, 6 and 7 of weights.
  TileShapes shapes(int64_t tokens) const {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = static_cast<uint8_t>(i >= 6 ? rows() : tokens);
      shapes.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? bytes : kTileRowBytes);
    }
    return shapes;
  }
};

// What is asked for ahead of its use: lines of memory for each step, of each block.
struct AmxAhead {
  const char* next[kAmxBlocks];
  int64_t lines;

  FEWBIT_INLINE void step(int block) {
    for (int64_t i = 0; i < lines; ++i, next[block] += 64) __builtin_prefetch(next[block], 0, 2);
  }
};

// sums[tile][block] of some steps: added to what is there unless `fresh`.
template <class Tiles, class Codes, int tiles, int blocks>
void amx_product(const AmxSteps& steps, int64_t count, const char* const* inputs, const uint32_t* const* panels,
                 uint32_t* sums, bool fresh, AmxAhead& ahead) {
  unroll<tiles>([&](auto tile) FEWBIT_LAMBDA {
    unroll<blocks>([&](auto block) FEWBIT_LAMBDA {
      constexpr int kSums = 2 * decltype(tile)::value + decltype(block)::value;
      if (fresh) return Tiles::template zero<kSums>();
      Tiles::template load<kSums>(sums + kSums * kTileWords, kTileRowBytes);
    });
  });
  for (int64_t i = 0; i < count; ++i) {
    unroll<tiles>([&](auto tile) FEWBIT_LAMBDA {
      Tiles::template load<4 + decltype(tile)::value>(inputs[tile] + i * steps.tile_bytes(), steps.bytes);
    });
    unroll<blocks>([&](auto block) FEWBIT_LAMBDA {
      Tiles::template load<6 + decltype(block)::value>(panels[block] + i * steps.rows() * kBlockRows, kTileRowBytes);
      ahead.step(block);
      unroll<tiles>([&](auto tile) FEWBIT_LAMBDA {
        constexpr int kTile = decltype(tile)::value, kBlock = decltype(block)::value;
        Codes::template add<Tiles, 2 * kTile + kBlock, 4 + kTile, 6 + kBlock>();
      });
    });
  }
  unroll<tiles>([&](auto tile) FEWBIT_LAMBDA {
    unroll<blocks>([&](auto block) FEWBIT_LAMBDA {
      constexpr int kSums = 2 * decltype(tile)::value + decltype(block)::value;
      Tiles::template store<kSums>(sums + kSums * kTileWords, kTileRowBytes);
    });
  });
}

// Inputs of a tile of tokens: [steps][kTileRows][bytes of a step], then where sums are shifted the sums of each group's
// inputs [groups][kTileRows], then each token's scale.
template <class Vector, class Registers, class Codes>
class AmxPanels {
 public:
  static constexpr int kTile = kTileRows;

  explicit AmxPanels(const Job& job) : job_(job), codes_(job.weight), steps_(job.weight, Codes::kInputBytes) {}

  int64_t bytes() const {
    const int64_t sums = Codes::kShiftsSums ? job_.weight.groups : 0;
    return steps_.count * steps_.tile_bytes() + (sums + 1) * kTileRows * 4;
  }
  // As many as stay within the cache, in nearly equal parts.
  int64_t tiles_at_a_time() const {
    const int64_t all = Tiles(job_.tokens, kTile).count, parts = (all * bytes() + kAmxInputBytes - 1) / kAmxInputBytes;
    return (all + parts - 1) / parts;
  }

  void multiply(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory) const {
    constexpr int64_t kPanel = kAmxSteps * kTileWords;
    const int64_t pairs = (count + 1) / kAmxTiles, size = pairs * kAmxTiles * kAmxPanels * kTileWords;  // of all sums
    uint32_t* panels = static_cast<uint32_t*>(scratch(Scratch::kPanel, (kAmxPanels * kPanel + 2 * size) * 4));
    uint32_t* sums = panels + kAmxPanels * kPanel;
    float* totals = reinterpret_cast<float*>(sums + size);
    Registers::configure(steps_.shapes((tiles.tokens + tiles.count - 1) / tiles.count));
    for (int64_t begin = blocks.begin; begin < blocks.end; begin += kAmxPanels) {
      const Range some{begin, begin + kAmxPanels < blocks.end ? begin + kAmxPanels : blocks.end};
      for (Range steps = steps_.stretch(0); steps.begin < steps_.count; steps = steps_.stretch(steps.end)) {
        const uint32_t* ready[kAmxPanels] = {};
        AmxAhead ahead[kAmxPanels / kAmxBlocks];
        for (int64_t i = 0; i < some.end - begin; ++i) {
          ready[i] = panel_of(begin + i, steps, panels + i * kPanel);
          if (i % kAmxBlocks == 0) ahead[i / kAmxBlocks] = after(begin + i, blocks.end, steps, pairs);
        }
        for (int64_t tile = 0; tile < count; tile += kAmxTiles) {
          const Range pair{tile, tile + kAmxTiles < count ? tile + kAmxTiles : count};
          for (int64_t i = 0; begin + i < some.end; i += kAmxBlocks) {
            const Range two{begin + i, begin + i + kAmxBlocks < some.end ? begin + i + kAmxBlocks : some.end};
            const int64_t at = place_of(tile, i);
            // Groups that end here need no sums afterwards: they share the first, which stay in the cache.
            uint32_t* own = steps_.of_group <= kAmxSteps ? sums : sums + at;
            sum_tiles(two, steps, tiles, first, pair, memory, ready + i, own, totals + at, ahead[i / kAmxBlocks]);
          }
        }
      }
      write(some, tiles, first, count, memory, totals);
    }
    Registers::release();
  }

 protected:
  // Where the sums of groups and the tokens' scales start.
  int64_t sums_at() const { return steps_.count * steps_.tile_bytes(); }
  int64_t scales_at() const { return bytes() - kTileRows * 4; }

  // A token's inputs, in the order of the weight's slots, into the tile.
  void place_token(const void* slots, int64_t token, char* inputs) const {
    const int64_t size = job_.weight.group_slots * Codes::kInputBytes;
    const char* from = static_cast<const char*>(slots);
    char* to = inputs + token * steps_.bytes;
    for (int64_t group = 0; group < job_.weight.groups; ++group, from += size) {
      for (int64_t at = 0; at < size; at += steps_.bytes, to += steps_.tile_bytes()) {
        const int64_t left = size - at < steps_.bytes ? size - at : steps_.bytes;
        std::memcpy(to, from + at, static_cast<size_t>(left));
        std::memset(to + left, 0, static_cast<size_t>(steps_.bytes - left));
      }
    }
  }

  const Job& job_;
  const Codes codes_;
  const AmxSteps steps_;

 private:
  // Where sums of a tile and the block of that index start: those of two by two lie together.
  static int64_t place_of(int64_t tile, int64_t block) {
    const int64_t both = tile / kAmxTiles * (kAmxPanels / kAmxBlocks) + block / kAmxBlocks;
    return ((both * kAmxTiles + tile % kAmxTiles) * kAmxBlocks + block % kAmxBlocks) * kTileWords;
  }

  // The block's panel of the steps: its words as they lie, or decoded into the memory.
  const uint32_t* panel_of(int64_t block, Range steps, uint32_t* memory) const {
    const Weight& weight = job_.weight;
    const bool padded = weight.group_slots * Codes::kInputBytes != steps_.of_group * steps_.bytes;
    if (Codes::kIsPanel && !padded) {
      return words_of<Codes::kSlots>(weight, block, 0, steps.begin * steps_.rows());
    }
    uint32_t* to = memory;
    for (int64_t step = steps.begin; step < steps.end;) {
      const int64_t group = step / steps_.of_group, first = step % steps_.of_group;
      const int64_t count = steps.end - step < steps_.of_group - first ? steps.end - step : steps_.of_group - first;
      const Range rows{first * steps_.rows(), (first + count) * steps_.rows()};
      const int64_t all = weight.group_slots / Codes::kSlots, last = rows.end / Codes::kWordRows;
      const Range words{rows.begin / Codes::kWordRows, first + count < steps_.of_group ? last : all};
      codes_.decode(weight, block, group, words, to);
      const int64_t decoded = (words.end - words.begin) * Codes::kWordRows, left = rows.end - rows.begin - decoded;
      std::memset(to + decoded * kBlockRows, 0, static_cast<size_t>(left * kBlockRows) * 4);
      to += count * steps_.rows() * kBlockRows;
      step += count;
    }
    return memory;
  }

  // What comes after these steps of the block and the next one, to be asked for while `pairs` of tiles are multiplied.
  AmxAhead after(int64_t block, int64_t end, Range steps, int64_t pairs) const {
    const bool same = steps.end < steps_.count;
    const int64_t step = same ? steps.end : 0, first = same ? block : block + kAmxPanels;
    AmxAhead ahead{};
    if (!Codes::kScaled || first >= end) return ahead;  // a plain weight's rows are far apart
    for (int i = 0; i < kAmxBlocks; ++i) {
      const int64_t row = step % steps_.of_group * steps_.rows();
      ahead.next[i] = reinterpret_cast<const char*>(
          words_of<Codes::kSlots>(job_.weight, first + i, step / steps_.of_group, row / Codes::kWordRows));
    }
    ahead.lines = (steps_.rows() + Codes::kWordRows * pairs - 1) / (Codes::kWordRows * pairs);
    return ahead;
  }

  // The steps of some blocks by one pair of tiles. `sums` and `totals` are [tile][block][kTileRows][kBlockRows].
  void sum_tiles(Range blocks, Range steps, const Tiles& tiles, int64_t first, Range pair, const char* memory,
                 const uint32_t* const* panels, uint32_t* sums, float* totals, AmxAhead& ahead) const {
    for (int64_t step = steps.begin; step < steps.end;) {
      const int64_t group = step / steps_.of_group, group_end = (group + 1) * steps_.of_group;
      const int64_t end = steps.end < group_end ? steps.end : group_end;
      const char* inputs[kAmxTiles] = {};
      const uint32_t* rows[kAmxBlocks] = {};
      for (int64_t i = 0; i < pair.end - pair.begin; ++i) {
        inputs[i] = memory + (pair.begin + i) * bytes() + step * steps_.tile_bytes();
      }
      for (int64_t i = 0; i < blocks.end - blocks.begin; ++i) {
        rows[i] = panels[i] + (step - steps.begin) * steps_.rows() * kBlockRows;
      }
      with_width<kAmxTiles>(static_cast<int>(pair.end - pair.begin), [&](auto width) {
        with_width<kAmxBlocks>(static_cast<int>(blocks.end - blocks.begin), [&](auto height) {
          amx_product<Registers, Codes, decltype(width)::value, decltype(height)::value>(
              steps_, end - step, inputs, rows, sums, step % steps_.of_group == 0, ahead);
        });
      });
      step = end;
      if (end < group_end) return;
      for (int64_t tile = pair.begin; tile < pair.end; ++tile) {
        for (int64_t block = blocks.begin; block < blocks.end; ++block) {
          const int64_t at = ((tile - pair.begin) * kAmxBlocks + block - blocks.begin) * kTileWords;
          add_scaled(block, group, tiles.width(first + tile), memory + tile * bytes(), sums + at, totals + at);
        }
      }
    }
  }

  void add_scaled(int64_t block, int64_t group, int width, const char* inputs, const uint32_t* sums,
                  float* totals) const {
    if constexpr (!Codes::kScaled) {
      std::memcpy(totals, sums, static_cast<size_t>(width * kBlockRows) * 4);
      return;
    }
    const int32_t* shifts = reinterpret_cast<const int32_t*>(inputs + sums_at()) + group * kTileRows;
    unroll<kParts<Vector>>([&](auto part) FEWBIT_LAMBDA {
      const auto scale = scales_of<Vector>(job_.weight, block, group, part);
      const auto zero = zeros_of<Vector>(job_.weight, block, group, part);
      for (int token = 0; token < width; ++token) {
        const int64_t at = token * kBlockRows + part * Vector::kLanes;
        float* total = totals + at;
        const auto before = group == 0 ? Vector::zero() : Vector::load_floats(total);
        if constexpr (Codes::kInputBytes == 2) {
          const auto sum = Vector::load_floats(reinterpret_cast<const float*>(sums + at));
          Vector::store(total, Vector::multiply_add(scale, sum, before));
        } else {
          auto sum = Vector::load(sums + at);
          if constexpr (Codes::kShiftsSums) {
            sum = Vector::subtract_words(sum, Vector::multiply_words(zero, Vector::broadcast_word(shifts + token)));
          }
          Vector::store(total, Vector::multiply_add(scale, Vector::to_floats(sum), before));
        }
      }
    });
  }

  // Token by token, so that what two blocks write of a line of memory is written at once.
  void write(Range blocks, const Tiles& tiles, int64_t first, int64_t count, const char* memory,
             const float* totals) const {
    for (int64_t tile = 0; tile < count; ++tile) {
      const float* own_scales = reinterpret_cast<const float*>(memory + tile * bytes() + scales_at());
      for (int token = 0; token < tiles.width(first + tile); ++token) {
        for (int64_t block = blocks.begin; block < blocks.end; ++block) {
          write_out<Vector>(job_, block, tiles.first(first + tile) + token, 1,
                            totals + place_of(tile, block - blocks.begin) + token * kBlockRows,
                            Codes::kInputBytes == 2 ? nullptr : own_scales + token);
        }
      }
    }
  }
};

// Integer codes of a byte or a nibble under activations rounded to bytes.
template <class Vector, class Registers, class Codes>
class AmxIntegers : public AmxPanels<Vector, Registers, Codes> {
 public:
  using Base = AmxPanels<Vector, Registers, Codes>;

  AmxIntegers(const Job& job, const Rounding& rounding)
      : Base(job), rounding_(rounding), common_(common_scale<Vector>(job, rounding)) {}

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = Base::job_.weight;
    const int64_t size = whole_vectors(weight.columns), slots_size = whole_vectors(weight.slots());
    float* row = static_cast<float*>(scratch(Scratch::kRow, 5 * size + slots_size));
    int8_t* codes = reinterpret_cast<int8_t*>(row + size);
    int8_t* slots = has_padding(weight) ? codes + size : codes;
    char* inputs = memory + index * Base::bytes();
    [[maybe_unused]] int32_t* sums = reinterpret_cast<int32_t*>(inputs + Base::sums_at());
    float* scales = reinterpret_cast<float*>(inputs + Base::scales_at());
    for (int token = 0; token < tiles.width(tile); ++token) {
      row_to_floats<Vector>(token_row(Base::job_, tiles.first(tile) + token), Base::job_.dtype, weight.columns, row);
      const float scale = common_ > 0 ? common_ : scale_for(largest_of<Vector>(row, weight.columns), rounding_);
      scales[token] = scale;
      round_to_bytes<Vector>(row, weight.columns, scale, rounding_, codes);
      if (slots != codes) place_slots(weight, codes, slots);
      if constexpr (Codes::kShiftsSums) {
        for (int64_t group = 0; group < weight.groups; ++group) {
          int32_t sum = 0;
          for (int64_t i = 0; i < weight.group_slots; ++i) sum += slots[group * weight.group_slots + i];
          sums[group * kTileRows + token] = sum;
        }
      }
      Codes::order(slots, weight.slots());
      Base::place_token(slots, token, inputs);
    }
  }

 private:
  const Rounding& rounding_;
  const float common_;  // the scale of all tokens, 0 where each has its own
};

// Any codes under bf16 as it is.
template <class Vector, class Registers, class Codes>
class AmxFloats : public AmxPanels<Vector, Registers, Codes> {
 public:
  using Base = AmxPanels<Vector, Registers, Codes>;
  using Base::Base;

  void place(const Tiles& tiles, int64_t tile, int64_t index, char* memory) const {
    const Weight& weight = Base::job_.weight;
    uint16_t* slots = static_cast<uint16_t*>(scratch(Scratch::kRow, whole_vectors(weight.slots()) * 2));
    for (int token = 0; token < tiles.width(tile); ++token) {
      const void* row = token_row(Base::job_, tiles.first(tile) + token);
      if (has_padding(weight)) place_slots(weight, static_cast<const uint16_t*>(row), slots);
      Base::place_token(has_padding(weight) ? slots : row, token, memory + index * Base::bytes());
    }
  }
};

inline bool amx_pays(const Job& job) {
  return job.tokens >= kAmxTokens && job.tokens * job.weight.group_slots >= kAmxTokensTimesGroup;
}

// Whether amx_linear can compute it and is worth it.
inline bool takes_amx(const Job& job) { return amx_pays(job) && job.dtype == Dtype::kBf16 && !job.weight.minima; }

template <class Vector, class Registers>
void amx_linear(const Job& job, Team& team, Range blocks) {
  with_fields<Vector>(job.weight.element, [&](auto fields) {
    using Codes = AmxBf16<Vector, decltype(fields)>;
    run(AmxFloats<Vector, Registers, Codes>(job), job.tokens, team, blocks);
  });
}

// Whether amx_dense can compute it and is worth it.
inline bool takes_amx_dense(const Job& job) {
  return job.tokens >= kAmxDenseTokens && job.dtype == Dtype::kBf16 && job.weight.columns % 2 == 0 &&
         job.weight.columns < kAmxDenseColumns;
}

template <class Vector, class Registers>
void amx_dense(const Job& job, Team& team, Range blocks) {
  Job one_group = job;
  one_group.weight.groups = 1;
  one_group.weight.group_slots = one_group.weight.group_features = job.weight.columns;
  run(AmxFloats<Vector, Registers, AmxDense<Vector>>(one_group), job.tokens, team, blocks);
}

template <class Vector, class Registers>
void amx_integer_linear(const Job& job, const Rounding& rounding, Team& team, Range blocks) {
  const auto use = [&](const auto& arithmetic) { run(arithmetic, job.tokens, team, blocks); };
  job.weight.element == Element::kInt8 ? use(AmxIntegers<Vector, Registers, AmxBytes<Vector>>(job, rounding))
                                       : use(AmxIntegers<Vector, Registers, AmxNibbles<Vector>>(job, rounding));
}

}  // namespace
}  // namespace fewbit
