#include "winnow/index_topk.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_topk";
constexpr const Implementation<IndexTopkArgs>* kList[] = {
    WINNOW_SM90_IMPLEMENTATION(index_topk) WINNOW_CUDA_IMPLEMENTATION(index_topk)
        WINNOW_SM90_FP8_IMPLEMENTATION(index_topk) WINNOW_AMX_IMPLEMENTATION(index_topk)
            WINNOW_CPU_IMPLEMENTATIONS(index_topk) &
    ref::index_topk_implementation};

void check(const IndexTopkArgs& a) {
  ops::check_scorer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends,
                    {a.index_query_scale, a.index_key_scale, a.dot_scale});
  ops::check_selection(kName, a.topk_indices, a.topk_lengths, a.topk_scores,
                       ops::wide_dtype(a.index_query.dtype), a.index_query.shape[0]);
  ops::check_kept(kName, a.keep_first, a.keep_last, a.topk_indices.shape[1]);
  WINNOW_CHECK(kName, a.workspace_budget >= 0, "workspace_budget must not be negative, got {}",
               a.workspace_budget);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

// Under a budget that is too small, an implementation asks for the least that it needs.
std::int64_t bytes_within_budget(const IndexTopkArgs& a) {
  const Implementation<IndexTopkArgs>& chosen = first_accepting(kName, kList, ops::device_of(a), a);
  const std::int64_t bytes = chosen.workspace_bytes(a);
  WINNOW_CHECK(kName, a.workspace_budget == 0 || bytes <= a.workspace_budget,
               "workspace_budget must be at least {} bytes for {}, got {}", bytes, chosen.name,
               a.workspace_budget);
  return bytes;
}

}  // namespace

void index_topk(const IndexTopkArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_ranges(kName, args.starts, args.ends, args.index_key.keys());
  ops::validate_pages(kName, args.index_key, args.starts, args.ends);
  ops::validate_scales(kName, args.index_key, args.index_query_scale, args.index_key_scale,
                       args.starts, args.ends);
  const SteadyThreads steady;  // the budget holds for the threads that run
  if (args.workspace_budget > 0) bytes_within_budget(args);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t index_topk_workspace_bytes(const IndexTopkArgs& args) {
  check(args);
  return bytes_within_budget(args);
}

Explanation explain(const IndexTopkArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
