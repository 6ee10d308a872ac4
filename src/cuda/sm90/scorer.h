// The scorer of compute capability 9.0 (scorer.cu), as index_scores and index_topk call it.
#pragma once

#include "cuda/scorer.h"

namespace winnow::cuda::sm90 {

constexpr int kScorerDim = 128;  // channels

// What E4M3 is multiplied as: bf16, which is exact, or itself, by tensor cores that add with about 14 bits.
enum class Products { kBF16, kE4M3 };

// TMA steps by multiples of 16 bytes, forwards.
inline Refusal refuse_boxes(const Tensor& query, const Tensor& key) {
  const std::int64_t step = 16 / dtype_bytes(query.dtype);
  for (const std::int64_t stride : {query.strides[0], query.strides[1], key.strides[0]}) {
    if (stride % step != 0) return "rows, heads and keys must lie at multiples of 16 bytes";
    if (stride <= 0) return "strides must be positive";
  }
  return {};
}

template <class Args>
Refusal refuse_scorer(const Args& a) {
  const Refusal refusal = cuda::refuse_scorer(a);
  if (!refusal.empty()) return refusal;
  const Tensor &q = a.index_query, &k = a.index_key.data;
  if (q.dtype != DType::kBF16 && q.dtype != DType::kE4M3) return "takes bf16 and e4m3";
  if (q.shape[1] != 32 && q.shape[1] != 64) return "takes 32 or 64 index heads";
  if (q.shape[2] != kScorerDim) return "takes 128 channels";
  if (a.index_key.paged()) return "takes keys in one piece";
  if (q.dtype == DType::kE4M3) return {};
  return refuse_boxes(q, k);
}

template <class Args>
Refusal refuse_code_scorer(const Args& a) {
  const Refusal refusal = refuse_scorer(a);
  if (!refusal.empty()) return refusal;
  if (a.index_query.dtype != DType::kE4M3 || !a.index_query_scale.empty())
    return "takes FP8 alone, with a scale for each key";
  return refuse_boxes(a.index_query, a.index_key.data);
}

// Scratch of a call of `score` over so many rows and keys, at a multiple of 16 bytes. It is bounded.
std::int64_t score_workspace_bytes(std::int64_t rows, std::int64_t keys, int heads, DType dtype,
                                   Products products);
// As cuda::score, to which it leaves what does not begin at a multiple of 16 bytes: an address is no
// part of a plan. Codes that are multiplied as bf16 may lie anywhere.
void score(const char* operation, const Scorer& scorer, void* workspace, Products products,
           cudaStream_t stream);

}  // namespace winnow::cuda::sm90
