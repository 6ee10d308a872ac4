// attention_target over any slots: of lists, or of a window of keys that all rows share.
#pragma once

#include "cuda/attention.h"
#include "cuda/kernel.h"

namespace winnow::cuda {

template <class T>
struct AttentionTarget {
  SlotLists slots;
  const T *query = nullptr, *key = nullptr;
  std::int64_t query_row, query_head, key_row, key_head;
  const float* lse;
  std::int64_t lse_row, lse_head;
  std::int64_t first = 0, rows = 0, tiles = 0;  // rows [first, first + rows); tiles of slots
  int kv_heads, group, dim;
  float scale;
  bool query_vectors, key_vectors;
  float* target = nullptr;
  std::int64_t target_row = 0, target_slot = 0;

  AttentionTarget() = default;
  AttentionTarget(const Tensor& q, const Tensor& k, const Tensor& lse_of, double softmax_scale)
      : query(q.as<T>()),
        key(k.as<T>()),
        query_row(q.strides[0]),
        query_head(q.strides[1]),
        key_row(k.strides[0]),
        key_head(k.strides[1]),
        lse(lse_of.as<float>()),
        lse_row(lse_of.strides[0]),
        lse_head(lse_of.strides[1]),
        kv_heads(static_cast<int>(k.shape[1])),
        group(static_cast<int>(q.shape[1]) / kv_heads),
        dim(static_cast<int>(q.shape[2])),
        scale(static_cast<float>(softmax_scale)),
        query_vectors(has_vector_rows(q)),
        key_vectors(has_vector_rows(k)) {}
};

// target[row - first, slot] for `rows` rows from `first` on and slots.topk slots.
template <class T>
void run_attention_target(const char* operation, AttentionTarget<T> target, cudaStream_t stream);

}  // namespace winnow::cuda
