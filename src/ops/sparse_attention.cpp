#include "winnow/sparse_attention.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "sparse_attention";
constexpr const Implementation<SparseAttentionArgs>* kList[] = {
    WINNOW_SM90_IMPLEMENTATION(sparse_attention) WINNOW_CUDA_IMPLEMENTATION(sparse_attention)
        WINNOW_CPU_IMPLEMENTATIONS(sparse_attention) &
    ref::sparse_attention_implementation};

void check(const SparseAttentionArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0], heads = a.query.shape[1];
  ops::check_slots(kName, a.topk_indices, a.topk_lengths, rows);
  ops::check_tensor(kName, "output", a.output,
                    a.output.dtype == DType::kF32 ? DType::kF32 : a.query.dtype, {rows, heads, -1},
                    "[rows, heads, dim_v]");
  ops::check_value(kName, a.key, a.value, a.output.shape[2]);
  ops::check_tensor(kName, "lse", a.lse, ops::wide_dtype(a.query.dtype), {rows, heads},
                    "[rows, heads]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void sparse_attention(const SparseAttentionArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.key.keys(), args.topk_indices,
                      args.topk_lengths);
  ops::validate_pages(kName, args.key, args.starts, args.ends);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t sparse_attention_workspace_bytes(const SparseAttentionArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const SparseAttentionArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
