// I[i, j] = sum_h w[i, h] * relu(q[i, h, :] . k[j, :]), in double.
#include "ref/implementations.h"
#include "ref/index_score.h"

namespace winnow::ref {
namespace {

void run(const IndexScoresArgs& a, Workspace) {
  const std::int64_t rows = a.index_query.shape[0], keys = a.index_key.keys();
  const std::int64_t width = a.index_scores.shape[1];
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    for (std::int64_t t = 0; t < range.length() && t < width; ++t) {
      set(a.index_scores, i, t, index_score_of(a, i, range.start + t));
    }
  }
}

}  // namespace

const Implementation<IndexScoresArgs> index_scores_implementation = {"reference", accept,
                                                                     no_workspace, run};

}  // namespace winnow::ref
