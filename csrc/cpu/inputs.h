// Activations in the order in which tiles read them: [slot][token of the tile], padding slots zero, so that a tile
// reads one stretch of memory whatever the groups, their padding or the act-order of the weight.
#pragma once

#include "decode.h"
#include "threads.h"
#include "vectors.h"

namespace fewbit {
namespace {

// Tokens of a call are cut into tiles of nearly equal width.
struct Tiles {
  int64_t tokens;
  int64_t count;

  Tiles(int64_t tokens, int widest) : tokens(tokens), count((tokens + widest - 1) / widest) {}
  int64_t first(int64_t tile) const { return tokens * tile / count; }
  int width(int64_t tile) const { return static_cast<int>(first(tile + 1) - first(tile)); }
};

// How many features of group g there are, and the first of them, where features are in order.
inline int64_t features_in(const Weight& weight, int64_t group) {
  const int64_t left = weight.columns - group * weight.group_features;
  return left < weight.group_features ? left : weight.group_features;
}

// visit(slot, feature) for each slot of the group that has a feature.
template <class Visit>
FEWBIT_INLINE void each_feature(const Weight& weight, int64_t group, Visit&& visit) {
  const int64_t first_slot = group * weight.group_slots;
  if (weight.features) {
    for (int64_t i = 0; i < weight.group_slots; ++i) {
      const int32_t feature = weight.features[first_slot + i];
      if (feature >= 0) visit(first_slot + i, feature);
    }
    return;
  }
  const int64_t first_feature = group * weight.group_features, count = features_in(weight, group);
  for (int64_t i = 0; i < count; ++i) visit(first_slot + i, first_feature + i);
}

inline bool has_padding(const Weight& weight) {
  return weight.features || weight.group_slots != weight.group_features || weight.columns != weight.slots();
}

// Eight partial sums, which the compiler turns into one vector.
inline float sum_of(const float* numbers, int64_t count) {
  float lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += numbers[i + lane];
  }
  for (; i < count; ++i) lanes[i % 8] += numbers[i];
  return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// One token of a tile as floats. `inputs` is [slots][width], `sums` [groups][width] or null.
template <class Fields>
void place_floats(const Weight& weight, const float* row, int width, int token, float* inputs, float* sums) {
  constexpr int kPeriod = 16;  // the slots of a word repeat
  float factor[kPeriod];
  for (int i = 0; i < kPeriod; ++i) factor[i] = Fields::input_factor(i % Fields::kSlots);
  if (!has_padding(weight) && width == 1 && weight.columns % kPeriod == 0) {
    for (int64_t k = 0; k < weight.columns; k += kPeriod) {
      for (int i = 0; i < kPeriod; ++i) inputs[k + i] = row[k + i] * factor[i];
    }
  } else {
    if (has_padding(weight)) {
      for (int64_t slot = 0; slot < weight.slots(); ++slot) inputs[slot * width + token] = 0;
    }
    for (int64_t group = 0; group < weight.groups; ++group) {
      each_feature(weight, group, [&](int64_t slot, int64_t feature) {
        inputs[slot * width + token] = row[feature] * factor[slot % Fields::kSlots];
      });
    }
  }
  if (!sums) return;
  for (int64_t group = 0; group < weight.groups; ++group) {
    float sum = 0;
    if (weight.features) {
      each_feature(weight, group, [&](int64_t, int64_t feature) { sum += row[feature]; });
    } else {
      sum = sum_of(row + group * weight.group_features, features_in(weight, group));
    }
    sums[group * width + token] = sum;
  }
}

}  // namespace
}  // namespace fewbit
