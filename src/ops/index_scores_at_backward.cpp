#include "winnow/index_scores_at_backward.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_scores_at_backward";
constexpr const Implementation<IndexScoresAtBackwardArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(index_scores_at_backward)
        WINNOW_CPU_IMPLEMENTATIONS(index_scores_at_backward) &
    ref::index_scores_at_backward_implementation};

void check(const IndexScoresAtBackwardArgs& a) {
  ops::check_indexer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends);
  const std::int64_t rows = a.index_query.shape[0];
  ops::check_indices(kName, a.topk_indices, rows);
  check_shape(kName, "d_scores", a.d_scores, {rows, a.topk_indices.shape[1]}, "[rows, topk]");
  check_dtype(kName, "d_scores", a.d_scores, {ops::wide_dtype(a.index_query.dtype)});
  ops::check_indexer_gradients(kName, a.index_query, a.index_key, a.d_index_query, a.d_index_key,
                               a.d_index_weights);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void index_scores_at_backward(const IndexScoresAtBackwardArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.index_key.shape[0], args.topk_indices);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t index_scores_at_backward_workspace_bytes(const IndexScoresAtBackwardArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const IndexScoresAtBackwardArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
