#include "winnow/index_loss.h"

#include <array>
#include <cmath>

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "index_loss";
constexpr const Implementation<IndexLossArgs>* kList[] = {WINNOW_CPU_IMPLEMENTATIONS(index_loss) &
                                                          ref::index_loss_implementation};

auto inputs_of(const IndexLossArgs& a) {
  return std::array{ops::Named{"attention_target", a.attention_target},
                    ops::Named{"topk_scores", a.topk_scores},
                    ops::Named{"topk_indices", a.topk_indices}, ops::Named{"starts", a.starts},
                    ops::Named{"ends", a.ends}};
}
auto outputs_of(const IndexLossArgs& a) {
  return std::array{ops::Named{"kl", a.kl}, ops::Named{"d_scores", a.d_scores}};
}

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
  ops::check_memory(kName, inputs_of(a), outputs_of(a));
}

}  // namespace

void index_loss(const IndexLossArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, inputs_of(args), outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, ops::kAnyKey, args.topk_indices);
  run_first(kName, kList, args, workspace);
}

std::int64_t index_loss_workspace_bytes(const IndexLossArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const IndexLossArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
