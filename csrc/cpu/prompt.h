// Many tokens of one text through a decoder, a part of them at a time, as one parallel region. Threads divide tokens among
// themselves, and heads and positions in attention. Where each has tokens enough, linear layers are divided by tokens
// too, so that nobody waits but before and after attention; otherwise by output features.
#pragma once

#include "decoder.h"
#include "panel_linear.h"
#include "prompt_attention.h"
#include "rows.h"

namespace fewbit {
namespace {

// Tokens of a thread at a time, which are what layers multiply at a time, and of all threads.
constexpr int64_t kOwnTokens = kPanelTokensAtATime;
constexpr int64_t kPromptTokens = 768;

// From so many of its own on a thread decodes every panel for itself: twice the panels, for half the tokens.
constexpr int64_t kTokensApart = 48;

inline int64_t tokens_at_a_time(int64_t threads) {
  return threads * kOwnTokens < kPromptTokens ? threads * kOwnTokens : kPromptTokens;
}

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
    const int64_t most = tokens_at_a_time(team_.count);
    for (int64_t first = 0; first < step_.tokens; first += most) {
      tokens_ = step_.tokens - first < most ? step_.tokens - first : most;
      first_ = first;
      mine_ = share(tokens_, team_.thread, team_.count);
      // Only the last part is shorter: what the team keeps of shared memory comes after what threads ask for alone.
      apart_ = tokens_ / team_.count >= kTokensApart;
      std::memcpy(rows_.stream + mine_.begin * hidden_,
                  static_cast<const char*>(step_.x) + (first + mine_.begin) * hidden_,
                  static_cast<size_t>((mine_.end - mine_.begin) * hidden_));
      for (int64_t i = 0; i < decoder_.block_count; ++i) run_block(decoder_.blocks[i], i);
      team_.wait();
    }
    if (team_.thread == 0) norm(rows_.stream + (tokens_ - 1) * hidden_, decoder_.final_norm, rows_.row, decoder_.hidden);
    multiply_features(decoder_.head, rows_.row, step_.logits, 1);
  }

 private:
  void run_block(const DecoderBlock& block, int64_t index) {
    norm_rows(block.attention_norm);
    multiply(block.query, rows_.row, rows_.query);
    multiply(block.key, rows_.row, rows_.key);
    multiply(block.value, rows_.row, rows_.value);
    wait_for_features();
    place_heads(block, index);
    team_.wait();
    team_.guarded([&] { attend(index); });
    team_.wait();
    multiply(block.output, rows_.attended, rows_.output);
    wait_for_features();
    add_to_stream();
    norm_rows(block.mlp_norm);
    multiply(block.gate, rows_.row, rows_.gate);
    multiply(block.up, rows_.row, rows_.up);
    multiply_gate_by_up();
    multiply(block.down, rows_.gate, rows_.output);
    wait_for_features();
    add_to_stream();
  }

  // A thread's share of a layer: all features of its own tokens, or its own features of all.
  void multiply(const LinearLayer& layer, const char* x, char* y) {
    if (!apart_) return multiply_features(layer, x, y, tokens_);
    const Weight weight = weight_of(layer);
    Team alone = team_.alone();
    run_layer(kernels_, layer,
              job_of(layer, x + mine_.begin * weight.columns * width_, y + mine_.begin * weight.rows * width_,
                     mine_.end - mine_.begin, dtype_),
              alone, {0, weight.blocks()});
  }

  // Waits for the input, not for the output.
  void multiply_features(const LinearLayer& layer, const void* x, void* y, int64_t tokens) {
    team_.wait();
    run_layer(kernels_, layer, job_of(layer, x, y, tokens, dtype_), team_,
              share(weight_of(layer).blocks(), team_.thread, team_.count));
  }

  // Before tokens are looked at whose features other threads have computed.
  void wait_for_features() const {
    if (!apart_) team_.wait();
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

  // The thread's shares of gate and up are the same, so that their product waits for nobody.
  void multiply_gate_by_up() const {
    const int64_t inner = decoder_.intermediate;
    const Range blocks = share((inner + kBlockRows - 1) / kBlockRows, team_.thread, team_.count);
    const int64_t first = apart_ ? 0 : blocks.begin * kBlockRows, end = apart_ ? inner : blocks.end * kBlockRows;
    const Range rows = apart_ ? mine_ : Range{0, tokens_};
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const int64_t at = (i * inner + first) * width_;
      silu_and_multiply<Vector>(rows_.gate + at, rows_.up + at, rows_.gate + at, (end < inner ? end : inner) - first,
                                dtype_);
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
  bool apart_ = false;                  // whether layers are divided by tokens
};

template <class Vector>
void read_prompt(const Decoder& decoder, const Step& step, const Kernels& kernels) {
  const int64_t most = tokens_at_a_time(step.threads);
  const PromptRows rows(decoder, step.tokens < most ? step.tokens : most);
  parallel_for_team(static_cast<int>(step.threads),
                    [&](Team& team) { ThreadPrompt<Vector>(decoder, step, kernels, rows, team).run(); });
}

}  // namespace
}  // namespace fewbit
