// index_scores: what the lightning indexer thinks of every visible key.
//
//   I[i, j] = sum_h index_weights[i, h] * relu(index_query[i, h, :] . index_key[j, :])
//
// - Row i sees the keys [start, end), which is [starts[i], ends[i]) clamped to the key space.
// - Column t of the row is key start + t. A key that is missing (key_view.h) scores NaN, which no
//   selection takes.
// - An empty range writes nothing.
// - Columns past the row's range keep what they held; scores past the width are dropped.
// - dot_scale multiplies q . k before the ReLU.
// - FP8: query and key in E4M3 with a scale per key, which multiplies the finished score; the scale
//   of the query belongs into index_weights. MXFP8: a power of two per 32 channels of both; exact,
//   so the score is that of the dequantised numbers (which f32 must hold; on GPUs the scales of a
//   key, and those of a row, must lie within 2^124 of each other besides, or the smallest numbers
//   lose bits). A NaN in codes or scales (E8M0 byte 255) makes the key's scores NaN.
// - Products and both sums are accumulated in f32 (f64 for f64 inputs), in one fixed order: a score
//   depends on its query row, its key and nothing else. NaN stays NaN. On AMX (bf16) subnormal
//   numbers count as 0. Tensor cores of GPUs truncate where they add.
// - Meant for tests, pictures and whoever wants the matrix. Selection without it: index_topk.
// - Source: the lightning indexer, DeepSeek-V3.2-Exp report, "Prototype of DSA", equation (1).
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/key_view.h"
#include "winnow/tensor.h"

namespace winnow {

struct IndexScoresArgs {
  Tensor index_query;    // [rows, index_heads, index_dim] f64 | f32 | bf16 | f16 | e4m3, after RoPE
  KeyView index_key;     // [keys, index_dim] or pages, dtype of index_query; one key head for all
  Tensor index_weights;  // [rows, index_heads] f32 | bf16 (f64 with f64), scaled by heads^-0.5 and
                         // dim^-0.5
  Tensor starts;         // int32 [rows]
  Tensor ends;           // int32 [rows]
  bool relu = true;      // false: the identity in place of ReLU
  Tensor index_scores;   // out: f32 (f64 with f64) [rows, width]

  Tensor index_query_scale{};  // MXFP8: e8m0 [rows, index_heads, index_dim / 32]; else left out
  Tensor index_key_scale{};  // FP8: f32 [keys]; MXFP8: e8m0 [keys, index_dim / 32]; else left out.
                             // With pages, [pages, page_size] in place of [keys]
  double dot_scale = 1;      // positive, finite: of q . k, before the ReLU; rounded to f32
};

void index_scores(const IndexScoresArgs& args, Workspace workspace);
std::int64_t index_scores_workspace_bytes(const IndexScoresArgs& args);
Explanation explain(const IndexScoresArgs& args);

}  // namespace winnow
