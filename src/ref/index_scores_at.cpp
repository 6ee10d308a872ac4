// topk_scores[i, s] = I[i, topk_indices[i, s]], in double.
#include <cmath>

#include "ref/implementations.h"
#include "ref/index_score.h"

namespace winnow::ref {
namespace {

void run(const IndexScoresAtArgs& a, Workspace) {
  const std::int64_t rows = a.index_query.shape[0], keys = a.index_key.shape[0];
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    for (std::int64_t s = 0; s < a.topk_indices.shape[1]; ++s) {
      const std::int64_t id = get_id(a.topk_indices, i, s);
      set(a.topk_scores, i, s,
          range.contains(id)
              ? index_score(a.index_query, a.index_key, a.index_weights, a.relu, i, id)
              : -INFINITY);
    }
  }
}

}  // namespace

const Implementation<IndexScoresAtArgs> index_scores_at_implementation = {"reference", accept,
                                                                          no_workspace, run};

}  // namespace winnow::ref
