// Scores in double, rounded to the dtype in which index_scores would give them (f32, or f64 for
// f64), and the rule of selection.h.
#include "base/selection_statistics.h"
#include "ref/implementations.h"
#include "ref/index_score.h"
#include "ref/selection.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const IndexTopkArgs& a) {
  return selection_bytes(a.topk_indices.shape[1], a.index_key.keys());
}

void run(const IndexTopkArgs& a, Workspace workspace) {
  const std::int64_t keys = a.index_key.keys();
  const bool round = a.index_query.dtype != DType::kF64;
  for (std::int64_t i = 0; i < a.index_query.shape[0]; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    Selection selection(workspace, keys, a, range);
    for (std::int64_t j = range.start; j < range.end; ++j) {
      const double score = index_score_of(a, i, j);
      selection.offer(round ? static_cast<float>(score) : score, j);
    }
    selection.write(a.topk_indices, a.topk_lengths, a.topk_scores, i);
  }
  note_selection({a.index_query.shape[0], 1, 0});
}

}  // namespace

const Implementation<IndexTopkArgs> index_topk_implementation = {"reference", accept,
                                                                 workspace_bytes, run};

}  // namespace winnow::ref
