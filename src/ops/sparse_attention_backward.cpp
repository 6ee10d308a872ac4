#include "winnow/sparse_attention_backward.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "sparse_attention_backward";
constexpr const Implementation<SparseAttentionBackwardArgs>* kList[] = {
    WINNOW_SM90_IMPLEMENTATION(sparse_attention_backward)
        WINNOW_CUDA_IMPLEMENTATION(sparse_attention_backward)
            WINNOW_CPU_IMPLEMENTATIONS(sparse_attention_backward) &
    ref::sparse_attention_backward_implementation};

void check(const SparseAttentionBackwardArgs& a) {
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.query.shape[0], heads = a.query.shape[1], dim_qk = a.query.shape[2];
  const std::int64_t keys = a.key.shape[0], kv_heads = a.key.shape[1];
  const DType wide = ops::wide_dtype(a.query.dtype);
  ops::check_slots(kName, a.topk_indices, a.topk_lengths, rows);
  check_shape(kName, "output", a.output, {rows, heads, -1}, "[rows, heads, dim_v]");
  check_dtype(kName, "output", a.output, {a.query.dtype, DType::kF32});
  const std::int64_t dim_v = a.output.shape[2];
  ops::check_value(kName, a.key, a.value, dim_v);
  check_shape(kName, "lse", a.lse, {rows, heads}, "[rows, heads]");
  check_dtype(kName, "lse", a.lse, {wide});
  check_shape(kName, "d_output", a.d_output, {rows, heads, dim_v}, "[rows, heads, dim_v]");
  check_dtype(kName, "d_output", a.d_output, {a.output.dtype});

  ops::check_tensor(kName, "d_query", a.d_query, wide, {rows, heads, dim_qk},
                    "[rows, heads, dim_qk]");
  ops::check_tensor(kName, "d_key", a.d_key, wide, {keys, kv_heads, dim_qk},
                    "[keys, kv_heads, dim_qk]");
  if (a.value.empty()) {
    WINNOW_CHECK(kName, a.d_value.empty(),
                 "d_value must be left out where value is: d_key holds both gradients, got {}",
                 shape_text(a.d_value));
  } else {
    ops::check_tensor(kName, "d_value", a.d_value, wide, {keys, kv_heads, dim_v},
                      "[keys, kv_heads, dim_v]");
  }
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void sparse_attention_backward(const SparseAttentionBackwardArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_slots(kName, args.starts, args.ends, args.key.shape[0], args.topk_indices,
                      args.topk_lengths);
  if (args.rows_nonempty) {
    ops::validate_nonempty(kName, args.starts, args.ends, args.key.shape[0], args.topk_indices,
                           args.topk_lengths);
  }
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t sparse_attention_backward_workspace_bytes(const SparseAttentionBackwardArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const SparseAttentionBackwardArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
