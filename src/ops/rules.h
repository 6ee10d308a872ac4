// Rules on arguments that several operations share. All are checked before anything is written.
#pragma once

#include <span>

#include "base/check.h"
#include "base/numbers.h"
#include "ops/tensors.h"
#include "winnow/key_view.h"
#include "winnow/tensor.h"

namespace winnow::ops {

// The dtype of accumulation and of float outputs: f64 for f64 inputs, else f32.
inline DType wide_dtype(DType input) { return input == DType::kF64 ? DType::kF64 : DType::kF32; }

// Rules on the memory of a call, when all shapes are checked: what is written overlaps neither
// itself, nor what is read, nor another tensor that is written, and all lie on one device. A null
// pointer shares no memory.
void check_memory(const char* operation, std::span<const Named> inputs,
                  std::span<const Named> outputs);

// Before a run: every tensor that has elements has data. Without a run it may be null.
void check_data(const char* operation, std::span<const Named> inputs,
                std::span<const Named> outputs);

// A tensor whose last axis an operation works on, row by row: [.., dim], of any rank.
void check_rows(const char* operation, const char* name, const Tensor& t);

// Another tensor of rows, of the same shape.
void check_same_shape(const char* operation, const char* name, const Tensor& t,
                      const char* like_name, const Tensor& like);

// The scales of quantised rows: f32 or e8m0 [.., groups], where groups divides dim.
void check_group_scale(const char* operation, const char* name, const Tensor& scale,
                       const char* data_name, const Tensor& data);

// starts and ends: int32 [rows].
void check_ranges(const char* operation, const Tensor& starts, const Tensor& ends,
                  std::int64_t rows);

// A key view: its data in `dtype` and in the shape for keys in one piece ("[keys, index_dim]") or
// in pages ("[pages, page_size, index_dim]"); block_table int32 [requests, max_pages] and
// row_request int32 [rows], both or neither.
void check_keys(const char* operation, const char* name, const KeyView& keys, DType dtype,
                std::initializer_list<std::int64_t> shape, const char* layout,
                std::initializer_list<std::int64_t> paged_shape, const char* paged_layout,
                std::int64_t rows);

// index_query [rows, index_heads, index_dim], index_key of [index_dim], index_weights
// [rows, index_heads] and the ranges. The weights are f32 (f64), or bf16 where that is allowed.
void check_indexer(const char* operation, const Tensor& index_query, const KeyView& index_key,
                   const Tensor& index_weights, const Tensor& starts, const Tensor& ends);

// The same of operations that score in FP8 and MXFP8 too.
struct ScorerScales {
  const Tensor &index_query_scale, &index_key_scale;
  double dot_scale;
};
void check_scorer(const char* operation, const Tensor& index_query, const KeyView& index_key,
                  const Tensor& index_weights, const Tensor& starts, const Tensor& ends,
                  const ScorerScales& scales);

// What is pooled: index_key and gate [keys, index_dim], ape [pool_size, index_dim] with at least
// one token. `layout` is the text of the first two.
void check_gated_keys(const char* operation, const Tensor& index_key, const Tensor& gate,
                      const Tensor& ape, const char* layout);

// query [rows, heads, dim_qk], key of [kv_heads, dim_qk], the ranges and the scale.
void check_attention(const char* operation, const Tensor& query, const KeyView& key,
                     const Tensor& starts, const Tensor& ends, double softmax_scale);

// topk_indices int32 [rows, topk], topk >= 1.
void check_indices(const char* operation, const Tensor& topk_indices, std::int64_t rows);

// topk_indices and topk_lengths int32 [rows], each of which may be left out; lengths need indices.
void check_slots(const char* operation, const Tensor& topk_indices, const Tensor& topk_lengths,
                 std::int64_t rows);

// value of [kv_heads, dim_v], where the keys lie and in their dtype; left out, dim_v must fit into
// the key.
void check_value(const char* operation, const KeyView& key, const Tensor& value,
                 std::int64_t dim_v);

// A tensor of the given shape and dtype.
void check_tensor(const char* operation, const char* name, const Tensor& t, DType dtype,
                  std::initializer_list<std::int64_t> shape, const char* layout);

// What a selection writes: topk_indices int32 [rows, topk], topk_lengths int32 [rows] and, unless
// left out, topk_scores [rows, topk] of the given dtype.
void check_selection(const char* operation, const Tensor& topk_indices, const Tensor& topk_lengths,
                     const Tensor& topk_scores, DType score_dtype, std::int64_t rows);

// Keys that a selection keeps whatever their score: not negative, and no more than topk.
void check_kept(const char* operation, std::int32_t keep_first, std::int32_t keep_last,
                std::int64_t topk);

// The gradients of the indexer's inputs: d_index_query [rows, index_heads, index_dim], d_index_key
// [keys, index_dim], d_index_weights [rows, index_heads].
void check_indexer_gradients(const char* operation, const Tensor& index_query,
                             const Tensor& index_key, const Tensor& d_index_query,
                             const Tensor& d_index_key, const Tensor& d_index_weights);

}  // namespace winnow::ops
