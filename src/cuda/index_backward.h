// From the gradient of scores to the indexer's inputs, for a few rows and their slots: of lists, or
// of a window of keys that all rows share.
#pragma once

#include "cuda/backward.h"

namespace winnow::cuda {

// Bytes that a row of a chunk takes, nearly: for budgets.
inline std::int64_t index_scratch_bytes(const Tensor& query, std::int64_t slots) {
  const std::int64_t padded = round_up(slots, kPairSlots);
  const std::int64_t bytes = query.dtype == DType::kBF16 ? 2 : 4;
  return query.shape[1] * (padded * bytes + padded / kPairSlots * 4) +
         slots * (KeyOrder::kEntryBytes + query.shape[2] * 4) + 1;
}

template <class T>
struct IndexScratch {
  std::int64_t slots, padded;
  KeyOrder order;
  Multiplied<T>* gated;
  float *shares, *slot_rows;

  IndexScratch(Carve& carve, const Tensor& query, std::int64_t rows, std::int64_t slots_of_row,
               std::int64_t keys)
      : slots(slots_of_row),
        padded(round_up(slots, kPairSlots)),
        order(carve, rows, slots, keys),
        gated(carve.take<Multiplied<T>>(rows * query.shape[1] * padded)),
        shares(carve.take<float>(rows * query.shape[1] * (padded / kPairSlots))),
        slot_rows(carve.take<float>(rows * slots * query.shape[2])) {}
};

template <class T>
struct IndexWeights {
  BackwardChunk<T> b{};
  bool relu, bf16_weights;
  const void* weights;
  std::int64_t weight_row, weight_head;
  const float* d_scores = nullptr;  // of the chunk's first row
  std::int64_t d_scores_row = 0, d_scores_slot = 0;
  Multiplied<T>* gated;  // times weight, as the weights of backward.h lie
  float* shares;         // [row][head][tiles of slots]
  float* d_weights;
  std::int64_t d_weights_row, d_weights_head;
  KeyOrder::Sums sums{};

  // Of IndexScoresAtBackwardArgs or DenseIndexLossArgs. What is left: b.slots, b.first, b.rows,
  // d_scores.
  template <class Args>
  IndexWeights(const Args& a, const IndexScratch<T>& scratch)
      : relu(a.relu),
        bf16_weights(a.index_weights.dtype == DType::kBF16),
        weights(a.index_weights.data),
        weight_row(a.index_weights.strides[0]),
        weight_head(a.index_weights.strides[1]),
        gated(scratch.gated),
        shares(scratch.shares),
        d_weights(a.d_index_weights.template as<float>()),
        d_weights_row(a.d_index_weights.strides[0]),
        d_weights_head(a.d_index_weights.strides[1]) {
    b.counts = scratch.order.counts();
    b.list_slots = scratch.slots;
    b.padded_slots = scratch.padded;
    b.kv_heads = 1;
    b.group = static_cast<int>(a.index_query.shape[1]);
    b.query = HeadRows<T>(a.index_query);
    b.key = HeadRows<T>(a.index_key);
    b.dz = scratch.gated;
    b.shared = true;
    b.d_query = a.d_index_query.template as<float>();
    b.d_query_row = a.d_index_query.strides[0];
    b.d_query_head = a.d_index_query.strides[1];
    b.slot_rows = scratch.slot_rows;
    sums.a = a.d_index_key.template as<float>();
    sums.a_key = a.d_index_key.strides[0];
    sums.heads = 1;
    sums.channels = sums.split = b.width();
  }

  __device__ float weight(std::int64_t row, int head) const {
    const std::int64_t at = row * weight_row + head * weight_head;
    return bf16_weights ? to_float(static_cast<const BF16*>(weights)[at])
                        : static_cast<const float*>(weights)[at];
  }
};

// Adds to the sums of keys; d_index_query and d_index_weights are added to if b.adds.
template <class T>
void run_index_backward(const char* operation, const IndexWeights<T>& weights, KeyOrder& order,
                        cudaStream_t stream);

}  // namespace winnow::cuda
