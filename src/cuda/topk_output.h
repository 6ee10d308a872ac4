// Rows of what a selection writes: ids, lengths and, if wanted, scores, with any strides.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow::cuda {

struct TopkRow {
  std::int32_t* ids;
  std::int64_t id_step;
  float* scores;  // null: not wanted
  std::int64_t score_step;
  std::int32_t* length;
  std::int64_t topk;
  std::int32_t first_id;  // that of id 0 of the row

  __device__ void put(int slot, std::uint32_t id, float score) const {
    ids[slot * id_step] = first_id + static_cast<std::int32_t>(id);
    if (scores != nullptr) scores[slot * score_step] = score;
  }
  // The slots after the last member and the length, by the threads of a block.
  __device__ void end(std::int64_t count) const {
    for (std::int64_t slot = count + threadIdx.x; slot < topk; slot += blockDim.x) {
      ids[slot * id_step] = -1;
      if (scores != nullptr) scores[slot * score_step] = -INFINITY;
    }
    if (threadIdx.x == 0) *length = static_cast<std::int32_t>(count);
  }
};

struct TopkOutput {
  std::int32_t *ids, *lengths;
  float* scores;
  std::int64_t id_row, id_step, length_row, score_row = 0, score_step = 0, topk;

  TopkOutput(const Tensor& topk_indices, const Tensor& topk_lengths, const Tensor& topk_scores)
      : ids(topk_indices.as<std::int32_t>()),
        lengths(topk_lengths.as<std::int32_t>()),
        scores(topk_scores.empty() ? nullptr : topk_scores.as<float>()),
        id_row(topk_indices.strides[0]),
        id_step(topk_indices.strides[1]),
        length_row(topk_lengths.strides[0]),
        topk(topk_indices.shape[1]) {
    if (scores == nullptr) return;
    score_row = topk_scores.strides[0];
    score_step = topk_scores.strides[1];
  }
  __device__ TopkRow row(std::int64_t i, std::int64_t first_id) const {
    return {ids + i * id_row,
            id_step,
            scores == nullptr ? nullptr : scores + i * score_row,
            score_step,
            lengths + i * length_row,
            topk,
            static_cast<std::int32_t>(first_id)};
  }
};

}  // namespace winnow::cuda
