// One token through a decoder, as one parallel region: four waits a block. What is cheap is done by every thread for
// itself rather than waited for.
#pragma once

#include "attention.h"
#include "decoder.h"
#include "prompt.h"

namespace fewbit {
namespace {

// Rows that all threads see, in the memory of the thread that called.
struct SharedRows {
  char *query, *key, *value, *output, *gate, *up, *product, *down;
  float* parts;  // [threads][heads][part_size]

  SharedRows(const Decoder& decoder, int64_t threads) {
    const int64_t queries = decoder.heads * decoder.head_dim, keys = decoder.key_heads * decoder.head_dim;
    const int64_t parts_size = threads * decoder.heads * part_size(decoder.head_dim);
    const int64_t sizes[] = {queries,          keys, keys, decoder.hidden, decoder.intermediate, decoder.intermediate,
                             decoder.intermediate, decoder.hidden};
    char** rows[] = {&query, &key, &value, &output, &gate, &up, &product, &down};
    int64_t total = parts_size;
    for (const int64_t size : sizes) total += whole_vectors(size);
    float* memory = static_cast<float*>(scratch(Scratch::kShared, total * 4));
    parts = memory;
    memory += parts_size;
    for (int i = 0; i < 8; memory += whole_vectors(sizes[i]), ++i) *rows[i] = reinterpret_cast<char*>(memory);
  }
};

template <class Vector>
class ThreadStep {
 public:
  ThreadStep(const Decoder& decoder, const Step& step, const Kernels& kernels, SharedRows& shared, Team& team)
      : decoder_(decoder), step_(step), kernels_(kernels), shared_(shared), team_(team),
        dtype_(static_cast<Dtype>(decoder.dtype)), width_(bytes_of(dtype_)),
        queries_size_(decoder.heads * decoder.head_dim) {
    const int64_t widest = decoder.hidden > queries_size_ ? decoder.hidden : queries_size_;
    stream_ = static_cast<char*>(
        scratch(Scratch::kOwn, 4 * (whole_vectors(decoder.hidden) + 2 * whole_vectors(widest) + 2 * decoder.head_dim)));
    row_ = stream_ + 4 * whole_vectors(decoder.hidden);
    queries_ = reinterpret_cast<float*>(row_ + 4 * whole_vectors(widest));
    head_ = queries_ + whole_vectors(widest);
  }

  void run() {
    std::memcpy(stream_, step_.x, static_cast<size_t>(decoder_.hidden * width_));
    for (int64_t i = 0; i < decoder_.block_count; ++i) {
      const DecoderBlock& block = decoder_.blocks[i];
      project(block);
      team_.wait();
      attend_own_positions(block, i);
      team_.wait();
      join_heads(block);
      team_.wait();
      gate_and_up(block);
      team_.wait();
      multiply({{&block.down, shared_.product, shared_.down}});
      team_.wait();
      add_rows<Vector>(stream_, shared_.down, stream_, decoder_.hidden, dtype_);
    }
    norm(stream_, decoder_.final_norm, row_, decoder_.hidden);
    multiply({{&decoder_.head, row_, step_.logits}});
  }

 private:
  struct Product {
    const LinearLayer* layer;
    const void* x;
    void* y;
  };

  Job job(const Product& product) const { return job_of(*product.layer, product.x, product.y, 1, dtype_); }

  void run_own(const Product& product, Range blocks) {
    if (blocks.begin >= blocks.end) return;
    Team alone = team_.alone();
    run_layer(kernels_, *product.layer, job(product), alone, blocks);
  }

  // Layers whose blocks are divided among the threads as if they were one layer's.
  void multiply(std::initializer_list<Product> products) {
    int64_t total = 0, first = 0;
    for (const Product& product : products) total += job(product).weight.blocks();
    const Range mine = share(total, team_.thread, team_.count);
    for (const Product& product : products) {
      const int64_t size = job(product).weight.blocks();
      const int64_t begin = mine.begin - first, end = mine.end - first;
      run_own(product, {begin < 0 ? 0 : begin, end < size ? end : size});
      first += size;
    }
  }

  void norm(const void* x, const void* weight, void* to, int64_t count) const {
    rms_norm<Vector>(x, weight, to, count, decoder_.epsilon, dtype_);
  }

  void project(const DecoderBlock& block) {
    norm(stream_, block.attention_norm, row_, decoder_.hidden);
    multiply({{&block.query, row_, shared_.query}, {&block.key, row_, shared_.key}, {&block.value, row_, shared_.value}});
  }

  // Norm, if there is one, and rotation of a query or key head.
  void place_head(const char* from, const void* weight, void* to) {
    if (weight) {
      norm(from, weight, head_, decoder_.head_dim);
      from = reinterpret_cast<const char*>(head_);
    }
    rotate<Vector>(from, step_.cosines, step_.sines, to, decoder_.head_dim / 2, dtype_);
  }

  void attend_own_positions(const DecoderBlock& block, int64_t index) {
    const int64_t size = decoder_.head_dim, bytes = size * width_, group = decoder_.heads / decoder_.key_heads;
    const Range positions = share(step_.position + 1, team_.thread, team_.count);
    for (int64_t i = 0; i < decoder_.heads; ++i) {
      place_head(shared_.query + i * bytes, block.query_norm, row_);
      row_to_floats<Vector>(row_, dtype_, size, queries_ + i * size);
    }
    float* parts = shared_.parts + team_.thread * decoder_.heads * part_size(size);
    for (int64_t i = 0; i < decoder_.key_heads; ++i) {
      const int64_t at = (index * decoder_.key_heads + i) * step_.capacity * bytes;
      char *keys = static_cast<char*>(step_.keys) + at, *values = static_cast<char*>(step_.values) + at;
      if (team_.thread == team_.count - 1) {  // the last position is this thread's
        place_head(shared_.key + i * bytes, block.key_norm, keys + step_.position * bytes);
        std::memcpy(values + step_.position * bytes, shared_.value + i * bytes, static_cast<size_t>(bytes));
      }
      const CacheHead head{keys, values, size, static_cast<float>(decoder_.attention_scale), dtype_};
      attend<Vector>(head, positions, queries_ + i * group * size, group, parts + i * group * part_size(size));
    }
  }

  void join_heads(const DecoderBlock& block) {
    const int64_t size = part_size(decoder_.head_dim);
    for (int64_t i = 0; i < decoder_.heads; ++i) {
      join_parts<Vector>(shared_.parts + i * size, decoder_.heads * size, team_.count, decoder_.head_dim, head_,
                         row_ + i * decoder_.head_dim * width_, dtype_);
    }
    multiply({{&block.output, row_, shared_.output}});
  }

  // The thread's own blocks of gate and up are the same, so that their product waits for nobody.
  void gate_and_up(const DecoderBlock& block) {
    add_rows<Vector>(stream_, shared_.output, stream_, decoder_.hidden, dtype_);
    norm(stream_, block.mlp_norm, row_, decoder_.hidden);
    const Range blocks = share((decoder_.intermediate + kBlockRows - 1) / kBlockRows, team_.thread, team_.count);
    run_own({&block.gate, row_, shared_.gate}, blocks);
    run_own({&block.up, row_, shared_.up}, blocks);
    const int64_t first = blocks.begin * kBlockRows, last = blocks.end * kBlockRows;
    const int64_t count = (last < decoder_.intermediate ? last : decoder_.intermediate) - first;
    silu_and_multiply<Vector>(shared_.gate + first * width_, shared_.up + first * width_,
                              shared_.product + first * width_, count, dtype_);
  }

  const Decoder& decoder_;
  const Step& step_;
  const Kernels& kernels_;
  SharedRows& shared_;
  Team& team_;
  const Dtype dtype_;
  const int64_t width_, queries_size_;
  char *stream_, *row_;      // the residual stream; the input of a layer
  float *queries_, *head_;   // every head's query, rotated; room for one head
};

template <class Vector>
void decode_one(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  SharedRows shared(decoder, step.threads);
  parallel_for_team(static_cast<int>(step.threads),
                    [&](Team& team) { ThreadStep<Vector>(decoder, step, kernels, shared, team).run(); });
}

template <class Vector>
void decode(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  step.tokens == 1 ? decode_one<Vector>(decoder, step, kernels) : read_prompt<Vector>(decoder, step, kernels);
}

}  // namespace
}  // namespace fewbit
