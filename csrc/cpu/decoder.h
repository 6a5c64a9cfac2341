// A decoder of gated blocks as Python describes it, every member eight bytes, and a step of some tokens through it.
#pragma once

#include "prepared.h"

namespace fewbit {

// x += output(attention(norm(x))), then x += down(silu(gate(norm(x))) * up(norm(x))). Weights of norms are in the dtype
// of the activations.
struct DecoderBlock {
  const void *attention_norm, *mlp_norm;  // [hidden]
  const void *query_norm, *key_norm;      // [head_dim], or null
  LinearLayer query, key, value, output, gate, up, down;
};

struct Decoder {
  int64_t dtype;  // of activations and of the cache
  int64_t hidden, intermediate, heads, key_heads, head_dim;
  int64_t block_count;
  const DecoderBlock* blocks;
  const void* final_norm;
  LinearLayer head;
  double epsilon, attention_scale;
};

// The tokens of one text that follow `position` others.
struct Step {
  const void* x;                 // [tokens][hidden], the tokens' embeddings
  void* logits;                  // [vocabulary], after the last of them
  void *keys, *values;           // [block_count][key_heads][capacity][head_dim]; `position` rows are there already
  const float *cosines, *sines;  // [tokens][head_dim / 2] from `position` on, rounded to the dtype
  int64_t capacity, position, tokens, threads;
};

}  // namespace fewbit
