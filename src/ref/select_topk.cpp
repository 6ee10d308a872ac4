// The k best keys of every row, by given scores: the rule of selection.h over the row's range.
#include <limits>

#include "base/selection_statistics.h"
#include "ref/implementations.h"
#include "ref/selection.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const SelectTopkArgs& a) {
  return selection_bytes(a.topk_indices.shape[1], a.scores.shape[1]);
}

void run(const SelectTopkArgs& a, Workspace workspace) {
  const std::int64_t width = a.scores.shape[1];
  for (std::int64_t i = 0; i < a.scores.shape[0]; ++i) {
    RowRange range = row_range(a.starts, a.ends, i, std::numeric_limits<std::int32_t>::max());
    range.end = std::min(range.end, range.start + width);
    Selection selection(workspace, width, a, range);
    for (std::int64_t t = 0; t < range.length(); ++t) {
      selection.offer(get(a.scores, i, t), range.start + t);
    }
    selection.write(a.topk_indices, a.topk_lengths, a.topk_scores, i);
  }
  note_selection({a.scores.shape[0], 1, 0});
}

}  // namespace

const Implementation<SelectTopkArgs> select_topk_implementation = {"reference", accept,
                                                                   workspace_bytes, run};

}  // namespace winnow::ref
