#include "winnow/sparse_attention.h"

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "sparse_attention";
constexpr const Implementation<SparseAttentionArgs>* kList[] = {
    WINNOW_CPU_IMPLEMENTATIONS(sparse_attention) & ref::sparse_attention_implementation};

void check(const SparseAttentionArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0], heads = a.query.shape[1];
  const auto inputs = {a.query, a.key, a.value, a.topk_indices, a.topk_lengths, a.starts, a.ends};
  ops::check_slots(kName, a.topk_indices, a.topk_lengths, rows);
  ops::check_output(kName, "output", a.output,
                    a.output.dtype == DType::kF32 ? DType::kF32 : a.query.dtype, {rows, heads, -1},
                    "[rows, heads, dim_v]", inputs);
  ops::check_value(kName, a.key, a.value, a.output.shape[2]);
  ops::check_output(kName, "lse", a.lse, ops::wide_dtype(a.query.dtype), {rows, heads},
                    "[rows, heads]", inputs);
  check_no_overlap(kName, "output", a.output, "lse", a.lse);
}

}  // namespace

void sparse_attention(const SparseAttentionArgs& args, Workspace workspace) {
  check(args);
  run_first(kName, kList, args, workspace);
}

std::int64_t sparse_attention_workspace_bytes(const SparseAttentionArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const SparseAttentionArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
