#include "winnow/index_scores_at_backward.h"

#include <array>

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_scores_at_backward";
constexpr const Implementation<IndexScoresAtBackwardArgs>* kList[] = {
    WINNOW_CPU_IMPLEMENTATIONS(index_scores_at_backward) &
    ref::index_scores_at_backward_implementation};

auto inputs_of(const IndexScoresAtBackwardArgs& a) {
  return std::array{ops::Named{"index_query", a.index_query},
                    ops::Named{"index_key", a.index_key},
                    ops::Named{"index_weights", a.index_weights},
                    ops::Named{"topk_indices", a.topk_indices},
                    ops::Named{"starts", a.starts},
                    ops::Named{"ends", a.ends},
                    ops::Named{"d_scores", a.d_scores}};
}
auto outputs_of(const IndexScoresAtBackwardArgs& a) {
  return std::array{ops::Named{"d_index_query", a.d_index_query},
                    ops::Named{"d_index_key", a.d_index_key},
                    ops::Named{"d_index_weights", a.d_index_weights}};
}

void check(const IndexScoresAtBackwardArgs& a) {
  ops::check_indexer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends);
  const std::int64_t rows = a.index_query.shape[0];
  ops::check_indices(kName, a.topk_indices, rows);
  check_shape(kName, "d_scores", a.d_scores, {rows, a.topk_indices.shape[1]}, "[rows, topk]");
  check_dtype(kName, "d_scores", a.d_scores, {ops::wide_dtype(a.index_query.dtype)});
  ops::check_indexer_gradients(kName, a.index_query, a.index_key, a.d_index_query, a.d_index_key,
                               a.d_index_weights);
  ops::check_memory(kName, inputs_of(a), outputs_of(a));
}

}  // namespace

void index_scores_at_backward(const IndexScoresAtBackwardArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, inputs_of(args), outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.index_key.shape[0], args.topk_indices);
  run_first(kName, kList, args, workspace);
}

std::int64_t index_scores_at_backward_workspace_bytes(const IndexScoresAtBackwardArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const IndexScoresAtBackwardArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
