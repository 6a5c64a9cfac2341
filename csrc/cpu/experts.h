// Gated experts of a mixture, fused over experts: y = sum over a token's experts of weight * down(silu(gate(x)) * up(x)).
//
// Tokens are sorted by expert and copied together, so that each expert is one product over its own tokens. All experts'
// blocks are divided among the threads by their work, with two waits in between.
#pragma once

#include "prepared.h"
#include "rows.h"
#include "threads.h"

namespace fewbit {

// Every member eight bytes, as Python describes it. A layer holds the matrices of all experts one after another, each
// tensor with a leading axis, the shape too; they differ in nothing but the factor.
struct Experts {
  int64_t dtype, count, hidden, intermediate;
  LinearLayer gate, up, down;
};

struct Routing {
  const void* x;          // [tokens, hidden]
  void* y;                // likewise
  const int64_t* chosen;  // [tokens, per_token]: experts; a number beyond `count` is none
  const void* weights;    // likewise
  Dtype weights_dtype;
  int64_t tokens, per_token;
  int threads;
};

// One expert of a layer that holds all of them.
inline LinearLayer one_expert(const LinearLayer& layer, int64_t expert) {
  LinearLayer one = layer;
  one.shape = layer.shape + expert * kShapeSize;
  const Weight weight = weight_of(one);
  const int64_t scales = weight.blocks() * weight.groups * kBlockRows;
  const int64_t words = weight.blocks() * kBlockRows * (weight.slots() / slots_per_word(weight.element));
  const auto moved = [&](const void* from, int64_t bytes) -> const void* {
    return from ? static_cast<const char*>(from) + expert * bytes : nullptr;
  };
  one.words = moved(layer.words, words * 4);
  one.scales = moved(layer.scales, scales * (weight.scale_dtype == Dtype::kF32 ? 4 : 2));
  one.zeros = moved(layer.zeros, scales);
  one.minima = moved(layer.minima, scales * 4);
  one.features = moved(layer.features, weight.slots() * 4);
  return one;
}

namespace {

// Rows sorted by expert, in the memory of the thread that called.
struct SortedRows {
  int64_t *starts, *source, *place;  // [count + 1]; [rows]: token; [tokens * per_token]: row, or -1
  float* weights;                    // [tokens * per_token]
  char *x, *gate, *up, *product, *down;

  SortedRows(const Experts& experts, const Routing& routing) {
    const int64_t all = routing.tokens * routing.per_token;
    const int64_t hidden = all * experts.hidden, inner = all * experts.intermediate;
    const int64_t numbers = (experts.count + 1 + 2 * all) * 8;
    char* memory = static_cast<char*>(
        scratch(Scratch::kShared,
                numbers + 4 * (whole_vectors(all) + 2 * whole_vectors(hidden) + 3 * whole_vectors(inner)) + 64));
    starts = reinterpret_cast<int64_t*>(memory);
    source = starts + experts.count + 1;
    place = source + all;
    memory += (numbers + 63) / 64 * 64;
    weights = reinterpret_cast<float*>(memory);
    memory += 4 * whole_vectors(all);
    char** rows[] = {&x, &down, &gate, &up, &product};
    for (int i = 0; i < 5; ++i) {
      *rows[i] = memory;
      memory += 4 * whole_vectors(i < 2 ? hidden : inner);
    }
    sort(experts, routing, all);
  }

 private:
  void sort(const Experts& experts, const Routing& routing, int64_t all) {
    const auto known = [&](int64_t i) { return routing.chosen[i] >= 0 && routing.chosen[i] < experts.count; };
    for (int64_t i = 0; i <= experts.count; ++i) starts[i] = 0;
    for (int64_t i = 0; i < all; ++i) starts[known(i) ? routing.chosen[i] + 1 : 0] += known(i);
    for (int64_t i = 0; i < experts.count; ++i) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < all; ++i) {  // starts become ends, which are moved back below
      place[i] = known(i) ? starts[routing.chosen[i]]++ : -1;
      if (place[i] >= 0) source[place[i]] = i / routing.per_token;
    }
    for (int64_t i = experts.count; i > 0; --i) starts[i] = starts[i - 1];
    starts[0] = 0;
  }
};

template <class Vector>
class ThreadExperts {
 public:
  ThreadExperts(const Experts& experts, const Routing& routing, const Kernels& kernels, SortedRows& rows, Team& team)
      : experts_(experts), routing_(routing), kernels_(kernels), rows_(rows), team_(team),
        dtype_(static_cast<Dtype>(experts.dtype)), width_(bytes_of(dtype_)) {}

  void run() {
    gather();
    team_.wait();
    each_share(experts_.intermediate, [&](int64_t expert, Range blocks) { gate_and_up(expert, blocks); });
    team_.wait();
    each_share(experts_.hidden, [&](int64_t expert, Range blocks) {
      run_own(experts_.down, expert, rows_.product, experts_.intermediate, rows_.down, experts_.hidden, blocks);
    });
    team_.wait();
    add_up();
  }

 private:
  int64_t rows_of(int64_t expert) const { return rows_.starts[expert + 1] - rows_.starts[expert]; }

  void gather() {
    const Range mine = share(rows_.starts[experts_.count], team_.thread, team_.count);
    const int64_t bytes = experts_.hidden * width_;
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      std::memcpy(rows_.x + row * bytes, static_cast<const char*>(routing_.x) + rows_.source[row] * bytes,
                  static_cast<size_t>(bytes));
    }
  }

  // visit(expert, blocks) for this thread's share of `features` output features of every expert, by rows times blocks.
  template <class Visit>
  void each_share(int64_t features, Visit&& visit) {
    const int64_t blocks = (features + kBlockRows - 1) / kBlockRows;
    const Range mine = share(rows_.starts[experts_.count] * blocks, team_.thread, team_.count);
    for (int64_t expert = 0; expert < experts_.count; ++expert) {
      const int64_t rows = rows_of(expert), first = rows_.starts[expert] * blocks;
      if (rows == 0) continue;
      const auto bounded = [&](int64_t work) {
        const int64_t block = (work - first + rows - 1) / rows;
        return work <= first ? 0 : block < blocks ? block : blocks;
      };
      const Range own{bounded(mine.begin), bounded(mine.end)};
      if (own.begin < own.end) visit(expert, own);
    }
  }

  void run_own(const LinearLayer& stack, int64_t expert, const char* x, int64_t columns, char* y, int64_t features,
               Range blocks) {
    const LinearLayer layer = one_expert(stack, expert);
    const int64_t first = rows_.starts[expert];
    Team alone = team_.alone();
    run_layer(kernels_, layer,
              job_of(layer, x + first * columns * width_, y + first * features * width_, rows_of(expert), dtype_),
              alone, blocks);
  }

  void gate_and_up(int64_t expert, Range blocks) {
    run_own(experts_.gate, expert, rows_.x, experts_.hidden, rows_.gate, experts_.intermediate, blocks);
    run_own(experts_.up, expert, rows_.x, experts_.hidden, rows_.up, experts_.intermediate, blocks);
    const int64_t first = blocks.begin * kBlockRows, last = blocks.end * kBlockRows;
    const int64_t count = (last < experts_.intermediate ? last : experts_.intermediate) - first;
    for (int64_t row = rows_.starts[expert]; row < rows_.starts[expert + 1]; ++row) {
      const int64_t at = (row * experts_.intermediate + first) * width_;
      silu_and_multiply<Vector>(rows_.gate + at, rows_.up + at, rows_.product + at, count, dtype_);
    }
  }

  // Each token's rows, weighted, in the order in which its experts were chosen, in float32.
  void add_up() {
    const Range mine = share(routing_.tokens, team_.thread, team_.count);
    for (int64_t token = mine.begin; token < mine.end; ++token) {
      char* to = static_cast<char*>(routing_.y) + token * experts_.hidden * width_;
      for (int64_t i = 0; i < experts_.hidden; i += Vector::kLanes) {
        const int64_t left = experts_.hidden - i;
        auto sum = Vector::zero();
        for (int64_t k = token * routing_.per_token; k < (token + 1) * routing_.per_token; ++k) {
          if (rows_.place[k] < 0) continue;
          const char* from = rows_.down + (rows_.place[k] * experts_.hidden + i) * width_;
          sum = Vector::multiply_add(load_up_to<Vector>(from, dtype_, left), Vector::broadcast(rows_.weights[k]),
                                     sum);
        }
        store_up_to<Vector>(to + i * width_, dtype_, sum, left);
      }
    }
  }

  const Experts& experts_;
  const Routing& routing_;
  const Kernels& kernels_;
  SortedRows& rows_;
  Team& team_;
  const Dtype dtype_;
  const int64_t width_;
};

template <class Vector>
void experts(const Experts& given, const Routing& routing, const Kernels& kernels) {
  SortedRows rows(given, routing);
  row_to_floats<Vector>(routing.weights, routing.weights_dtype, routing.tokens * routing.per_token, rows.weights);
  parallel_for_team(routing.threads, [&](Team& team) { ThreadExperts<Vector>(given, routing, kernels, rows, team).run(); });
}

}  // namespace
}  // namespace fewbit
