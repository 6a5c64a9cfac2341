// Many tokens of one text through a decoder, a part of them at a time, as one parallel region. Threads divide rows among
// themselves between linear layers, output features in them, and heads and positions in attention.
#pragma once

#include "decoder.h"
#include "prompt_attention.h"
#include "rows.h"

namespace fewbit {
namespace {

// Tokens at a time. Two parts of what layers multiply at a time.
constexpr int64_t kPromptTokens = 192;

// Rows of all tokens that are under way, which all threads see, in the memory of the thread that called.
struct PromptRows {
  char *stream, *row, *query, *key, *value, *attended, *output, *gate, *up;

  PromptRows(const Decoder& decoder, int64_t tokens) {
    const int64_t queries = decoder.heads * decoder.head_dim, keys = decoder.key_heads * decoder.head_dim;
    const int64_t sizes[] = {decoder.hidden, decoder.hidden, queries,
                             keys,           keys,           queries,
                             decoder.hidden, decoder.intermediate, decoder.intermediate};
    char** rows[] = {&stream, &row, &query, &key, &value, &attended, &output, &gate, &up};
    int64_t total = 0;
    for (const int64_t size : sizes) total += whole_vectors(tokens * size) * 4;
    char* memory = static_cast<char*>(scratch(Scratch::kShared, total));
    for (int i = 0; i < 9; memory += whole_vectors(tokens * sizes[i]) * 4, ++i) *rows[i] = memory;
  }
};

template <class Vector>
class ThreadPrompt {
 public:
  ThreadPrompt(const Decoder& decoder, const Step& step, const Kernels& kernels, const PromptRows& rows, Team& team)
      : decoder_(decoder), step_(step), kernels_(kernels), rows_(rows), team_(team),
        dtype_(static_cast<Dtype>(decoder.dtype)), width_(bytes_of(dtype_)), hidden_(decoder.hidden * width_) {}

  void run() {
    for (int64_t first = 0; first < step_.tokens; first += kPromptTokens) {
      tokens_ = step_.tokens - first < kPromptTokens ? step_.tokens - first : kPromptTokens;
      first_ = first;
      mine_ = share(tokens_, team_.thread, team_.count);
      std::memcpy(rows_.stream + mine_.begin * hidden_,
                  static_cast<const char*>(step_.x) + (first + mine_.begin) * hidden_,
                  static_cast<size_t>((mine_.end - mine_.begin) * hidden_));
      for (int64_t i = 0; i < decoder_.block_count; ++i) run_block(decoder_.blocks[i], i);
      team_.wait();
    }
    if (team_.thread == 0) norm(rows_.stream + (tokens_ - 1) * hidden_, decoder_.final_norm, rows_.row, decoder_.hidden);
    multiply({{&decoder_.head, rows_.row, step_.logits}}, 1);
  }

 private:
  struct Product {
    const LinearLayer* layer;
    const void* x;
    void* y;
  };

  void run_block(const DecoderBlock& block, int64_t index) {
    norm_rows(block.attention_norm);
    multiply({{&block.query, rows_.row, rows_.query},
              {&block.key, rows_.row, rows_.key},
              {&block.value, rows_.row, rows_.value}},
             tokens_);
    team_.wait();
    place_heads(block, index);
    team_.wait();
    team_.guarded([&] { attend(index); });
    multiply({{&block.output, rows_.attended, rows_.output}}, tokens_);
    team_.wait();
    add_to_stream();
    norm_rows(block.mlp_norm);
    gate_and_up(block);
    multiply({{&block.down, rows_.gate, rows_.output}}, tokens_);
    team_.wait();
    add_to_stream();
  }

  // Layers whose blocks are divided among the threads as if they were one layer's. Waits before, not after.
  void multiply(std::initializer_list<Product> products, int64_t tokens) {
    int64_t total = 0, first = 0;
    for (const Product& product : products) total += weight_of(*product.layer).blocks();
    const Range mine = share(total, team_.thread, team_.count);
    for (const Product& product : products) {
      const int64_t size = weight_of(*product.layer).blocks();
      const auto within = [&](int64_t block) { return block < first ? 0 : block - first < size ? block - first : size; };
      multiply(product, tokens, {within(mine.begin), within(mine.end)});
      first += size;
    }
  }

  void multiply(const Product& product, int64_t tokens, Range blocks) {
    team_.wait();
    run_layer(kernels_, *product.layer, job_of(*product.layer, product.x, product.y, tokens, dtype_), team_, blocks);
  }

  void norm(const void* x, const void* weight, void* to, int64_t count) const {
    rms_norm<Vector>(x, weight, to, count, decoder_.epsilon, dtype_);
  }

  void norm_rows(const void* weight) const {
    for (int64_t i = mine_.begin; i < mine_.end; ++i) {
      norm(rows_.stream + i * hidden_, weight, rows_.row + i * hidden_, decoder_.hidden);
    }
  }

  void add_to_stream() const {
    for (int64_t i = mine_.begin; i < mine_.end; ++i) {
      char* stream = rows_.stream + i * hidden_;
      add_rows<Vector>(stream, rows_.output + i * hidden_, stream, decoder_.hidden, dtype_);
    }
  }

  char* cached(void* cache, int64_t block, int64_t head, int64_t position) const {
    const int64_t row = (block * decoder_.key_heads + head) * step_.capacity + position;
    return static_cast<char*>(cache) + row * decoder_.head_dim * width_;
  }

  // Rotates the own rows' queries where they are, and puts keys, rotated, and values into the cache.
  void place_heads(const DecoderBlock& block, int64_t index) {
    const int64_t size = decoder_.head_dim, bytes = size * width_;
    char* head = static_cast<char*>(scratch(Scratch::kOwn, 4 * whole_vectors(size)));
    for (int64_t i = mine_.begin; i < mine_.end; ++i) {
      const int64_t angle = (first_ + i) * size / 2, position = step_.position + first_ + i;
      const auto place = [&](const char* from, const void* weight, char* to) {
        if (weight) norm(from, weight, head, size);
        rotate<Vector>(weight ? head : from, step_.cosines + angle, step_.sines + angle, to, size / 2, dtype_);
      };
      for (int64_t h = 0; h < decoder_.heads; ++h) {
        char* query = rows_.query + (i * decoder_.heads + h) * bytes;
        place(query, block.query_norm, query);
      }
      for (int64_t h = 0; h < decoder_.key_heads; ++h) {
        const int64_t at = (i * decoder_.key_heads + h) * bytes;
        place(rows_.key + at, block.key_norm, cached(step_.keys, index, h, position));
        std::memcpy(cached(step_.values, index, h, position), rows_.value + at, static_cast<size_t>(bytes));
      }
    }
  }

  // Strips in turn, back and forth, since the later ones see more.
  void attend(int64_t index) const {
    const int64_t group = decoder_.heads / decoder_.key_heads, most = kStripRows / group;
    const int64_t even = tokens_ * decoder_.key_heads / (2 * team_.count);
    const int64_t length = even < 1 || most < 1 ? 1 : even < most ? even : most;
    const int64_t strips = (tokens_ + length - 1) / length;
    for (int64_t i = 0; i < strips * decoder_.key_heads; ++i) {
      const int64_t turn = i % (2 * team_.count);
      if ((turn < team_.count ? turn : 2 * team_.count - 1 - turn) != team_.thread) continue;
      attend_strip(index, i / strips, i % strips * length, length, group);
    }
  }

  void attend_strip(int64_t index, int64_t head, int64_t first, int64_t length, int64_t group) const {
    const int64_t left = tokens_ - first, at = (first * decoder_.heads + head * group) * decoder_.head_dim * width_;
    const CacheHead cache{cached(step_.keys, index, head, 0), cached(step_.values, index, head, 0), decoder_.head_dim,
                          static_cast<float>(decoder_.attention_scale), dtype_};
    const Strip strip{cache,
                      step_.position + first_ + first,
                      left < length ? left : length,
                      group,
                      rows_.query + at,
                      rows_.attended + at,
                      decoder_.heads * decoder_.head_dim};
    StripAttention<Vector>(strip).run();
  }

  // The thread's own blocks of gate and up are the same, so that their product waits for nobody.
  void gate_and_up(const DecoderBlock& block) {
    const Range blocks = share((decoder_.intermediate + kBlockRows - 1) / kBlockRows, team_.thread, team_.count);
    multiply({&block.gate, rows_.row, rows_.gate}, tokens_, blocks);
    multiply({&block.up, rows_.row, rows_.up}, tokens_, blocks);
    const int64_t first = blocks.begin * kBlockRows, last = blocks.end * kBlockRows;
    const int64_t count = (last < decoder_.intermediate ? last : decoder_.intermediate) - first;
    for (int64_t i = 0; i < tokens_; ++i) {
      const int64_t at = (i * decoder_.intermediate + first) * width_;
      silu_and_multiply<Vector>(rows_.gate + at, rows_.up + at, rows_.gate + at, count, dtype_);
    }
  }

  const Decoder& decoder_;
  const Step& step_;
  const Kernels& kernels_;
  const PromptRows& rows_;
  Team& team_;
  const Dtype dtype_;
  const int64_t width_, hidden_;        // bytes of a number, and of a row of the stream
  int64_t first_ = 0, tokens_ = 0;      // those under way
  Range mine_{};                        // of them, the rows of this thread
};

template <class Vector>
void read_prompt(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  const PromptRows rows(decoder, step.tokens < kPromptTokens ? step.tokens : kPromptTokens);
  parallel_for_team(static_cast<int>(step.threads),
                    [&](Team& team) { ThreadPrompt<Vector>(decoder, step, kernels, rows, team).run(); });
}

}  // namespace
}  // namespace fewbit
