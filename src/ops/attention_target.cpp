#include "winnow/attention_target.h"

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "attention_target";
constexpr const Implementation<AttentionTargetArgs>* kList[] = {
    WINNOW_CPU_IMPLEMENTATIONS(attention_target) & ref::attention_target_implementation};

void check(const AttentionTargetArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0];
  const DType wide = ops::wide_dtype(a.query.dtype);
  check_shape(kName, "lse", a.lse, {rows, a.query.shape[1]}, "[rows, heads]");
  check_dtype(kName, "lse", a.lse, {wide});
  ops::check_indices(kName, a.topk_indices, rows);
  ops::check_output(kName, "attention_target", a.attention_target, wide,
                    {rows, a.topk_indices.shape[1]}, "[rows, topk]",
                    {a.query, a.key, a.lse, a.topk_indices, a.starts, a.ends});
}

}  // namespace

void attention_target(const AttentionTargetArgs& args, Workspace workspace) {
  check(args);
  run_first(kName, kList, args, workspace);
}

std::int64_t attention_target_workspace_bytes(const AttentionTargetArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const AttentionTargetArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
