#include "winnow/select_topk.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "select_topk";
constexpr const Implementation<SelectTopkArgs>* kList[] = {
    WINNOW_SM90_IMPLEMENTATION(select_topk) WINNOW_CUDA_IMPLEMENTATION(select_topk)
        WINNOW_CPU_IMPLEMENTATIONS(select_topk) &
    ref::select_topk_implementation};

void check(const SelectTopkArgs& a) {
  check_shape(kName, "scores", a.scores, {-1, -1}, "[rows, width]");
  check_dtype(kName, "scores", a.scores, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  ops::check_ranges(kName, a.starts, a.ends, a.scores.shape[0]);
  ops::check_selection(kName, a.topk_indices, a.topk_lengths, a.topk_scores,
                       ops::wide_dtype(a.scores.dtype), a.scores.shape[0]);
  ops::check_kept(kName, a.keep_first, a.keep_last, a.topk_indices.shape[1]);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void select_topk(const SelectTopkArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_ranges(kName, args.starts, args.ends, ops::kAnyKey);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t select_topk_workspace_bytes(const SelectTopkArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const SelectTopkArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
