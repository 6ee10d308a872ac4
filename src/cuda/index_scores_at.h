// index_scores_at over any slots: of lists, or of a window of keys that all rows share.
#pragma once

#include "cuda/attention.h"
#include "cuda/kernel.h"

namespace winnow::cuda {

struct ScoresAt {
  SlotLists slots;
  DType dtype = DType::kF32;
  std::int64_t first = 0, rows = 0, tiles = 0;  // rows [first, first + rows); tiles of slots
  const void *query, *key, *weights;
  std::int64_t query_row, query_head, key_row, weight_row, weight_head;
  bool bf16_weights, vectors;  // vectors: all rows begin at multiples of 16 bytes
  int heads, dim;
  float floor;  // max(dot, floor): 0, or -inf without ReLU
  float* scores = nullptr;
  std::int64_t score_row = 0, score_slot = 0;

  __device__ float weight(std::int64_t row, int head) const {
    const std::int64_t at = row * weight_row + head * weight_head;
    return bf16_weights ? to_float(static_cast<const BF16*>(weights)[at])
                        : static_cast<const float*>(weights)[at];
  }
  // The id of a slot that counts, else -1.
  __device__ std::int64_t id(const RowSlots& list, std::int64_t slot) const {
    return slot < list.count ? list[slot] : -1;
  }
  __device__ void store(std::int64_t local_row, std::int64_t slot, float score) const {
    if (slot < slots.topk) scores[local_row * score_row + slot * score_slot] = score;
  }

  ScoresAt(const Tensor& q, const Tensor& k, const Tensor& w, bool relu)
      : dtype(q.dtype),
        query(q.data),
        key(k.data),
        weights(w.data),
        query_row(q.strides[0]),
        query_head(q.strides[1]),
        key_row(k.strides[0]),
        weight_row(w.strides[0]),
        weight_head(w.strides[1]),
        bf16_weights(w.dtype == DType::kBF16),
        vectors(has_vector_rows(q) && has_vector_rows(k)),
        heads(static_cast<int>(q.shape[1])),
        dim(static_cast<int>(q.shape[2])),
        floor(relu ? 0 : -INFINITY) {}
};

// scores[row - first, slot] for `rows` rows from `first` on and slots.topk slots.
void run_scores_at(const char* operation, ScoresAt scores, cudaStream_t stream);

}  // namespace winnow::cuda
