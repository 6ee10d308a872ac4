#include "winnow/index_scores.h"

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_scores";
constexpr const Implementation<IndexScoresArgs>* kList[] = {
    WINNOW_CPU_IMPLEMENTATIONS(index_scores) & ref::index_scores_implementation};

void check(const IndexScoresArgs& a) {
  ops::check_indexer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends);
  ops::check_output(kName, "index_scores", a.index_scores, ops::wide_dtype(a.index_query.dtype),
                    {a.index_query.shape[0], -1}, "[rows, width]",
                    {a.index_query, a.index_key, a.index_weights, a.starts, a.ends});
}

}  // namespace

void index_scores(const IndexScoresArgs& args, Workspace workspace) {
  check(args);
  run_first(kName, kList, args, workspace);
}

std::int64_t index_scores_workspace_bytes(const IndexScoresArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const IndexScoresArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
