// What index_scores and index_topk share on GPUs: one call that scores a rectangle of rows and keys
// (scorer.cu, scorer_f32.cu).
#pragma once

#include "base/refusal.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "cuda/rows.h"

namespace winnow::cuda {

// The inputs of a call and where its scores go. Strides in elements.
struct Scorer {
  DType dtype = DType::kF32;
  const void* query = nullptr;  // [rows, heads, dim]
  std::int64_t query_row = 0, query_head = 0;
  const E8M0* query_scale = nullptr;  // MXFP8; else null
  std::int64_t query_scale_row = 0, query_scale_head = 0;
  const void* key = nullptr;
  KeyPlaces places;
  const void* key_scale = nullptr;  // f32 with FP8, E8M0 with MXFP8
  KeyPlaces scale_places;
  const void* weights = nullptr;  // f32 or bf16
  bool bf16_weights = false;
  std::int64_t weight_row = 0, weight_head = 0;
  RowRanges ranges;
  std::int64_t rows = 0, requests = 0;  // requests: 0 where keys lie in one piece
  std::int32_t heads = 0, dim = 0;
  float dot_scale = 1;
  float floor = 0;  // max(dot, floor): 0, or -inf without ReLU

  // Rows [first_row, last_row), keys [first_key, last_key). The score of a row and key goes to
  // scores[(row - first_row) * score_row + key - origin], if that column is below `width`; origin
  // is first_key, or the row's own start.
  std::int64_t first_row = 0, last_row = 0, first_key = 0, last_key = 0;
  bool own_origin = true;
  float* scores = nullptr;
  std::int64_t score_row = 0, width = 0;

  template <class Args>  // IndexScoresArgs or IndexTopkArgs
  static Scorer of(const Args& a) {
    Scorer s;
    const Tensor &q = a.index_query, &w = a.index_weights, &qs = a.index_query_scale;
    s.dtype = q.dtype;
    s.query = q.data;
    s.query_row = q.strides[0];
    s.query_head = q.strides[1];
    if (!qs.empty()) {
      s.query_scale = qs.as<E8M0>();
      s.query_scale_row = qs.strides[0];
      s.query_scale_head = qs.strides[1];
    }
    s.key = a.index_key.data.data;
    s.places = KeyPlaces(a.index_key, a.index_key.data);
    if (!a.index_key_scale.empty()) {
      s.key_scale = a.index_key_scale.data;
      s.scale_places = KeyPlaces(a.index_key, a.index_key_scale);
    }
    s.weights = w.data;
    s.bf16_weights = w.dtype == DType::kBF16;
    s.weight_row = w.strides[0];
    s.weight_head = w.strides[1];
    s.ranges = RowRanges(a.starts, a.ends, a.index_key.keys());
    s.rows = s.last_row = q.shape[0];
    s.requests = a.index_key.paged() ? a.index_key.block_table.shape[0] : 0;
    s.heads = static_cast<std::int32_t>(q.shape[1]);
    s.dim = static_cast<std::int32_t>(q.shape[2]);
    s.dot_scale = static_cast<float>(a.dot_scale);
    s.floor = a.relu ? 0 : -INFINITY;
    s.last_key = a.index_key.keys();
    return s;
  }

  __device__ float weight(std::int64_t row, int head) const {
    const std::int64_t at = row * weight_row + head * weight_head;
    return bf16_weights ? to_float(static_cast<const BF16*>(weights)[at])
                        : static_cast<const float*>(weights)[at];
  }
  // The keys of a row that this call scores.
  __device__ Range visible(std::int64_t row) const {
    Range r = ranges[row];
    const std::int64_t origin = own_origin ? r.start : first_key;
    if (r.start < first_key) r.start = first_key;
    if (r.end > last_key) r.end = last_key;
    if (r.end > origin + width) r.end = origin + width;
    if (r.end <= r.start) return {0, 0};
    return r;
  }
  // Such that [key] is the score of a key.
  __device__ float* scores_of(std::int64_t row) const {
    const std::int64_t origin = own_origin ? ranges[row].start : first_key;
    return scores + (row - first_row) * score_row - origin;
  }
};

template <class Args>
Refusal refuse_scorer(const Args& a) {
  const Tensor& q = a.index_query;
  if (q.dtype == DType::kF64) return "f64 is left to CPUs";
  if (q.shape[1] > 128) return "takes 1 to 128 index heads";
  if (q.shape[2] > 256) return "takes 1 to 256 channels";
  if (!has_unit_stride(q) || !has_unit_stride(a.index_key.data)) {
    return "index_query and index_key must have stride 1 on their last axis";
  }
  if (!a.index_query_scale.empty() &&
      !(has_unit_stride(a.index_query_scale) && has_unit_stride(a.index_key_scale))) {
    return "scales of MXFP8 must have stride 1 on their last axis";
  }
  return {};
}

void score(const char* operation, const Scorer& scorer, cudaStream_t stream);
void score_f32(const char* operation, const Scorer& scorer, cudaStream_t stream);

}  // namespace winnow::cuda
