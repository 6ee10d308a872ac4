#include "winnow/select_topk.h"

#include <array>

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "select_topk";
constexpr const Implementation<SelectTopkArgs>* kList[] = {WINNOW_CPU_IMPLEMENTATIONS(select_topk) &
                                                           ref::select_topk_implementation};

auto inputs_of(const SelectTopkArgs& a) {
  return std::array{ops::Named{"scores", a.scores}, ops::Named{"starts", a.starts},
                    ops::Named{"ends", a.ends}};
}
auto outputs_of(const SelectTopkArgs& a) {
  return std::array{ops::Named{"topk_indices", a.topk_indices},
                    ops::Named{"topk_lengths", a.topk_lengths},
                    ops::Named{"topk_scores", a.topk_scores}};
}

void check(const SelectTopkArgs& a) {
  check_shape(kName, "scores", a.scores, {-1, -1}, "[rows, width]");
  check_dtype(kName, "scores", a.scores, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  ops::check_ranges(kName, a.starts, a.ends, a.scores.shape[0]);
  ops::check_selection(kName, a.topk_indices, a.topk_lengths, a.topk_scores,
                       ops::wide_dtype(a.scores.dtype), a.scores.shape[0]);
  ops::check_kept(kName, a.keep_first, a.keep_last, a.topk_indices.shape[1]);
  ops::check_memory(kName, inputs_of(a), outputs_of(a));
}

}  // namespace

void select_topk(const SelectTopkArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, inputs_of(args), outputs_of(args));
  ops::validate_ranges(kName, args.starts, args.ends, ops::kAnyKey);
  run_first(kName, kList, args, workspace);
}

std::int64_t select_topk_workspace_bytes(const SelectTopkArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const SelectTopkArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
