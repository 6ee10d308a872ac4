#include "winnow/index_topk.h"

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_topk";
constexpr const Implementation<IndexTopkArgs>* kList[] = {WINNOW_CPU_IMPLEMENTATIONS(index_topk) &
                                                          ref::index_topk_implementation};

void check(const IndexTopkArgs& a) {
  ops::check_indexer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends);
  ops::check_selection(kName, a.topk_indices, a.topk_lengths, a.topk_scores,
                       ops::wide_dtype(a.index_query.dtype), a.index_query.shape[0],
                       {a.index_query, a.index_key, a.index_weights, a.starts, a.ends});
}

}  // namespace

void index_topk(const IndexTopkArgs& args, Workspace workspace) {
  check(args);
  run_first(kName, kList, args, workspace);
}

std::int64_t index_topk_workspace_bytes(const IndexTopkArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const IndexTopkArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
