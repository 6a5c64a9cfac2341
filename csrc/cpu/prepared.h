// How Python describes a linear layer: pointers and numbers of eight bytes each, so that both sides agree about the
// layout without a compiler's help (`kernels/native.py`).
#pragma once

#include <cstring>

#include "job.h"
#include "team.h"

namespace fewbit {

enum class Arithmetic : int64_t {
  kDense = 0,       // a plain weight [N, K] in the dtype of the activations
  kWeightOnly = 1,  // codes under activations as they are
  kInteger = 2,     // integer codes under activations rounded to integers
};

struct LinearLayer {
  Arithmetic arithmetic;
  const int64_t* shape;  // of a prepared weight, see Shape; of a dense one N and K
  const void* words;     // the weight itself where it is dense
  const void *scales, *zeros, *minima, *features;
  const void* bias;           // [N] in the dtype of the activations, or null
  const float* stored_scale;  // these four where the arithmetic is of integers, see Rounding
  int64_t per_token, low, high;
};

// Plain numbers that describe a prepared weight: an int64 array that is made once for each layer.
enum Shape { kRows, kColumns, kGroups, kGroupSlots, kGroupFeatures, kElement, kScaleDtype, kZero, kFactorBits, kShapeSize };

inline float float_of(int64_t bits) {
  const int32_t low = static_cast<int32_t>(bits);
  float value;
  std::memcpy(&value, &low, sizeof value);
  return value;
}

inline Weight weight_of(const LinearLayer& layer) {
  Weight weight{};
  weight.words = static_cast<const uint32_t*>(layer.words);
  weight.rows = layer.shape[kRows];
  weight.columns = layer.shape[kColumns];
  weight.factor = 1;
  if (layer.arithmetic == Arithmetic::kDense) return weight;
  weight.scales = layer.scales;
  weight.zeros = static_cast<const uint8_t*>(layer.zeros);
  weight.minima = static_cast<const float*>(layer.minima);
  weight.features = static_cast<const int32_t*>(layer.features);
  weight.groups = layer.shape[kGroups];
  weight.group_slots = layer.shape[kGroupSlots];
  weight.group_features = layer.shape[kGroupFeatures];
  weight.element = static_cast<Element>(layer.shape[kElement]);
  weight.scale_dtype = static_cast<Dtype>(layer.shape[kScaleDtype]);
  weight.constant_zero = static_cast<int32_t>(layer.shape[kZero]);
  weight.factor = float_of(layer.shape[kFactorBits]);
  return weight;
}

inline Rounding rounding_of(const LinearLayer& layer) {
  return {layer.stored_scale, layer.per_token != 0, static_cast<float>(layer.low), static_cast<float>(layer.high)};
}

inline Job job_of(const LinearLayer& layer, const void* x, void* y, int64_t tokens, Dtype dtype) {
  return {weight_of(layer), x, layer.bias, y, tokens, dtype};
}

// Some blocks of output features of a layer, as a thread of the team.
inline void run_layer(const Kernels& kernels, const LinearLayer& layer, const Job& job, Team& team, Range blocks) {
  switch (layer.arithmetic) {
    case Arithmetic::kDense:
      return kernels.dense(job, team, blocks);
    case Arithmetic::kWeightOnly:
      return kernels.linear(job, team, blocks);
    case Arithmetic::kInteger:
      return kernels.integer_linear(job, rounding_of(layer), team, blocks);
  }
}

// All of a layer, by as many threads as are worth it.
inline void run_layer(const Kernels& kernels, const LinearLayer& layer, const Job& job, int threads) {
  constexpr int64_t kProductsPerThread = 1 << 17;  // below so many a second thread costs more than it brings
  const int64_t useful = job.weight.blocks() * kBlockRows * job.weight.slots() * job.tokens / kProductsPerThread;
  parallel_for_team(useful < threads ? static_cast<int>(useful) : threads, [&](Team& team) {
    run_layer(kernels, layer, job, team, share(job.weight.blocks(), team.thread, team.count));
  });
}

}  // namespace fewbit
