// From d_scores to d_index_query, d_index_key and d_index_weights, in double.
#include "ref/implementations.h"
#include "ref/index_score_backward.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const IndexScoresAtBackwardArgs& a) {
  return bytes_for_doubles(index_backward_doubles(a.index_query, a.index_key));
}

void run(const IndexScoresAtBackwardArgs& a, Workspace workspace) {
  const std::int64_t rows = a.index_query.shape[0], keys = a.index_key.shape[0];
  double* doubles = doubles_in(workspace);
  IndexScoreBackward backward(a.index_query, a.index_key, a.index_weights, a.relu, doubles);
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    backward.begin_row(i);
    for (std::int64_t s = 0; s < a.topk_indices.shape[1]; ++s) {
      const std::int64_t id = get_id(a.topk_indices, i, s);
      if (range.contains(id)) backward.add(id, get(a.d_scores, i, s));
    }
    backward.end_row(a.d_index_query, a.d_index_weights);
  }
  backward.end(a.d_index_key);
}

}  // namespace

const Implementation<IndexScoresAtBackwardArgs> index_scores_at_backward_implementation = {
    "reference", accept, workspace_bytes, run};

}  // namespace winnow::ref
