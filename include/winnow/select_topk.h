// select_topk: the k best keys of every row, by scores that are given.
//
// The one selection rule of winnow; index_topk selects by the same.
// - Row i sees the keys [start, end): start = max(starts[i], 0), end = min(ends[i], start + width).
//   Column t of `scores` is key start + t; columns past the range are never read.
// - Candidates are the visible keys whose score is neither NaN nor -inf; +inf is the largest.
// - Members are the k largest by value. At the cutoff the lowest ids win. +0 equals -0.
// - keep_minus_inf: scores of -inf are candidates too, the lowest.
// - The first keep_first and the last keep_last keys of the range are members whatever their score,
//   NaN excepted; they count within k. In a range of fewer keys, every key is kept once.
// - Ids come out ascending, -1 after the last. Fewer candidates than k: all of them.
// - The result is a function of the scores alone: no thread count, neighbour row or run changes it.
// - Source: the token selection, DeepSeek-V3.2-Exp report, "Prototype of DSA", equation (2); what
//   it leaves open (ties, NaN, -inf, order) is decided here.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/selection_statistics.h"
#include "winnow/tensor.h"

namespace winnow {

struct SelectTopkArgs {
  Tensor scores;        // [rows, width] f64 | f32 | bf16 | f16
  Tensor starts;        // int32 [rows]
  Tensor ends;          // int32 [rows]; ends <= starts: an empty row
  Tensor topk_indices;  // out: int32 [rows, topk], key ids of the call's key space, topk >= 1
  Tensor topk_lengths;  // out: int32 [rows], how many are valid
  Tensor topk_scores;  // out, may be left out: f32 (f64 with f64) [rows, topk], -inf after the last
  bool keep_minus_inf = false;
  std::int32_t keep_first = 0, keep_last = 0;  // keep_first + keep_last <= topk
};

void select_topk(const SelectTopkArgs& args, Workspace workspace);
std::int64_t select_topk_workspace_bytes(const SelectTopkArgs& args);
Explanation explain(const SelectTopkArgs& args);

}  // namespace winnow
