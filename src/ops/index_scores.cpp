#include "winnow/index_scores.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_scores";
constexpr const Implementation<IndexScoresArgs>* kList[] = {
    WINNOW_SM90_IMPLEMENTATION(index_scores) WINNOW_CUDA_IMPLEMENTATION(index_scores)
        WINNOW_SM90_FP8_IMPLEMENTATION(index_scores) WINNOW_AMX_IMPLEMENTATION(index_scores)
            WINNOW_CPU_IMPLEMENTATIONS(index_scores) &
    ref::index_scores_implementation};

void check(const IndexScoresArgs& a) {
  ops::check_scorer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends,
                    {a.index_query_scale, a.index_key_scale, a.dot_scale});
  ops::check_tensor(kName, "index_scores", a.index_scores, ops::wide_dtype(a.index_query.dtype),
                    {a.index_query.shape[0], -1}, "[rows, width]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void index_scores(const IndexScoresArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_ranges(kName, args.starts, args.ends, args.index_key.keys());
  ops::validate_pages(kName, args.index_key, args.starts, args.ends);
  ops::validate_scales(kName, args.index_key, args.index_query_scale, args.index_key_scale,
                       args.starts, args.ends);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t index_scores_workspace_bytes(const IndexScoresArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const IndexScoresArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
