// pool_keys: one index key for every `pool_size` tokens (KPool), by a softmax over the tokens that
// each channel has for itself.
//
//   a[t, d] = gate[base + t, d] + ape[t, d]                          t in [0, pool_size)
//   pooled_key[m, d] = sum_t softmax_t(a[., d])[t] * index_key[base + t, d],   base = pool_bases[m]
//
// - Pool m holds the tokens [base, base + pool_size). A pool that begins before token 0 or ends
//   past the last key is absent: its row is written as zeros.
// - Softmax, products and sum in f32 (f64 for f64 inputs), t ascending. What is rounded to the
//   dtype of the key besides the result is a choice: see PoolRounding.
// - A pool's bits depend on its tokens and on ape alone; append_pools gives the same.
// - A channel of NaN, of +inf in a gate, or of -inf in all gates is NaN; no other channel is.
// - Where pools begin: pools.h. Selection: index_topk over pooled_key, then expand_pools.
// - Source: KPool of Megatron Core (dsa_indexer_kpool) and glm5_next of Hugging Face Transformers.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

enum class PoolRounding : std::uint8_t {
  kOnce,      // weights, products and sum stay wide; the result is rounded (Megatron Core)
  kKeyDtype,  // weights, and then products, are rounded to the dtype of the key (Hugging Face)
};

struct PoolKeysArgs {
  Tensor index_key;   // [keys, index_dim] f64 | f32 | bf16 | f16, after norm and RoPE
  Tensor gate;        // [keys, index_dim], dtype of index_key
  Tensor ape;         // [pool_size, index_dim] f32 (f64 with f64): by a token's place in its pool
  Tensor pool_bases;  // int32 [pools]: first token of each pool
  PoolRounding rounding = PoolRounding::kOnce;
  Tensor pooled_key;  // out: [pools, index_dim], dtype of index_key
};

void pool_keys(const PoolKeysArgs& args, Workspace workspace);
std::int64_t pool_keys_workspace_bytes(const PoolKeysArgs& args);
Explanation explain(const PoolKeysArgs& args);

}  // namespace winnow
