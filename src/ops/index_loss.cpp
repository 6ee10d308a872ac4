#include "winnow/index_loss.h"

#include <cmath>

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_loss";
constexpr const Implementation<IndexLossArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(index_loss) WINNOW_CPU_IMPLEMENTATIONS(index_loss) &
    ref::index_loss_implementation};

void check(const IndexLossArgs& a) {
  check_shape(kName, "attention_target", a.attention_target, {-1, -1}, "[rows, topk]");
  check_dtype(kName, "attention_target", a.attention_target, {DType::kF64, DType::kF32});
  const std::int64_t rows = a.attention_target.shape[0], topk = a.attention_target.shape[1];
  const DType dtype = a.attention_target.dtype;
  check_shape(kName, "topk_scores", a.topk_scores, {rows, topk}, "[rows, topk]");
  check_dtype(kName, "topk_scores", a.topk_scores, {dtype});
  ops::check_indices(kName, a.topk_indices, rows);
  check_shape(kName, "topk_indices", a.topk_indices, {rows, topk}, "[rows, topk]");
  ops::check_ranges(kName, a.starts, a.ends, rows);
  WINNOW_CHECK(kName, std::isfinite(a.d_kl), "d_kl must be finite, got {}", a.d_kl);
  ops::check_tensor(kName, "kl", a.kl, dtype, {rows}, "[rows]");
  ops::check_tensor(kName, "d_scores", a.d_scores, dtype, {rows, topk}, "[rows, topk]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void index_loss(const IndexLossArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, ops::kAnyKey, args.topk_indices);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t index_loss_workspace_bytes(const IndexLossArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const IndexLossArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
