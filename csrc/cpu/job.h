// What every file of the extension agrees on: the prepared weight, one call's operands, and the table of an instruction
// set's functions. Nothing here depends on the instruction set.
#pragma once

#include <cstdint>

namespace fewbit {

// A prepared weight is cut into blocks of this many output features. A block holds its words one after another, each
// word once for every feature of the block: memory is read front to back, whatever the vector width, so the bytes are
// the same for every instruction set.
constexpr int kBlockRows = 16;

enum class Dtype : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

// How a 32-bit word is divided into codes. A word holds consecutive input slots of one output feature, lowest bits
// first.
enum class Element : int32_t {
  kInt2 = 0,  // unsigned fields of 2, 4 and 8 bits, their zero subtracted later
  kInt4 = 1,
  kInt8 = 2,
  kE2m1 = 3,  // 4-bit fields, read as 2 * number + 12
  kE4m3 = 4,  // these and the following in 8-bit fields; also the FNUZ variants, whose bias the factor holds
  kE5m2 = 5,
  kE2m3 = 6,
  kE3m2 = 7,
  kCount = 8,
};

constexpr int slots_per_word(Element element) {
  return element == Element::kInt2 ? 16 : element == Element::kInt4 || element == Element::kE2m1 ? 8 : 4;
}

// y[m, n] = factor * sum over groups g of
//     scale[g, n] * (sum of code * x  -  zero[g, n] * sum of x) + minimum[g, n] * sum of x
struct Weight {
  const uint32_t* words;    // [blocks][groups * group_slots / slots per word][kBlockRows]
  const void* scales;       // [blocks][groups][kBlockRows], of scale_dtype
  const uint8_t* zeros;     // like scales, or null: constant_zero
  const float* minima;      // like scales, or null
  const int32_t* features;  // [groups * group_slots]: input feature of each slot, -1 for none; null: in order
  int64_t rows, columns;    // N and K
  int64_t groups;
  int64_t group_slots;     // slots of a group, a multiple of the slots per word; those beyond its features are padding
  int64_t group_features;  // where `features` is null: how many consecutive features a group has
  Element element;
  Dtype scale_dtype;
  int32_t constant_zero;
  float factor;

  int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int64_t slots() const { return groups * group_slots; }
};

// One call: y[M, N] = x[M, K] @ W.T + bias.
struct Job {
  Weight weight;
  const void* x;     // [M, K], contiguous
  const void* bias;  // [N] or null
  void* y;           // [M, N]
  int64_t tokens;    // M
  Dtype dtype;       // of x, bias and y
};

// How activations become integers: one scale for each token, one for all of them, or one that is stored.
struct Rounding {
  const float* stored_scale;  // or null
  bool per_token;
  float low, high;
};

struct Decoder;
struct Step;
struct Experts;
struct Routing;
class Team;

// Consecutive items, blocks of output features for one.
struct Range {
  int64_t begin, end;
};

// The functions of one instruction set. Those of a layer compute some of its blocks of output features; the threads of a
// team call them together, each for blocks of its own.
struct Kernels {
  void (*linear)(const Job&, Team&, Range);
  void (*integer_linear)(const Job&, const Rounding&, Team&, Range);
  void (*dense)(const Job&, Team&, Range);
  void (*decode)(const Decoder&, const Step&, const Kernels&);
  void (*experts)(const Experts&, const Routing&, const Kernels&);
};

}  // namespace fewbit
