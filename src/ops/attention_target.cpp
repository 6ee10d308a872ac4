#include "winnow/attention_target.h"

#include <array>

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "attention_target";
constexpr const Implementation<AttentionTargetArgs>* kList[] = {
    WINNOW_CPU_IMPLEMENTATIONS(attention_target) & ref::attention_target_implementation};

auto inputs_of(const AttentionTargetArgs& a) {
  return std::array{ops::Named{"query", a.query},   ops::Named{"key", a.key},
                    ops::Named{"lse", a.lse},       ops::Named{"topk_indices", a.topk_indices},
                    ops::Named{"starts", a.starts}, ops::Named{"ends", a.ends}};
}
auto outputs_of(const AttentionTargetArgs& a) {
  return std::array{ops::Named{"attention_target", a.attention_target}};
}

void check(const AttentionTargetArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0];
  const DType wide = ops::wide_dtype(a.query.dtype);
  check_shape(kName, "lse", a.lse, {rows, a.query.shape[1]}, "[rows, heads]");
  check_dtype(kName, "lse", a.lse, {wide});
  ops::check_indices(kName, a.topk_indices, rows);
  ops::check_tensor(kName, "attention_target", a.attention_target, wide,
                    {rows, a.topk_indices.shape[1]}, "[rows, topk]");
  ops::check_memory(kName, inputs_of(a), outputs_of(a));
}

}  // namespace

void attention_target(const AttentionTargetArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, inputs_of(args), outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.key.shape[0], args.topk_indices);
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
