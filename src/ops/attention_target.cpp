#include "winnow/attention_target.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "attention_target";
constexpr const Implementation<AttentionTargetArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(attention_target) WINNOW_CPU_IMPLEMENTATIONS(attention_target) &
    ref::attention_target_implementation};

void check(const AttentionTargetArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0];
  const DType wide = ops::wide_dtype(a.query.dtype);
  check_shape(kName, "lse", a.lse, {rows, a.query.shape[1]}, "[rows, heads]");
  check_dtype(kName, "lse", a.lse, {wide});
  ops::check_indices(kName, a.topk_indices, rows);
  ops::check_tensor(kName, "attention_target", a.attention_target, wide,
                    {rows, a.topk_indices.shape[1]}, "[rows, topk]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void attention_target(const AttentionTargetArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.key.shape[0], args.topk_indices);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t attention_target_workspace_bytes(const AttentionTargetArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const AttentionTargetArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
