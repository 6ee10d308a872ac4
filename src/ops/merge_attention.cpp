#include "winnow/merge_attention.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "merge_attention";
constexpr const Implementation<MergeAttentionArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(merge_attention) WINNOW_CPU_IMPLEMENTATIONS(merge_attention) &
    ref::merge_attention_implementation};

void check(const MergeAttentionArgs& a) {
  check_shape(kName, "part_output", a.part_output, {-1, -1, -1, -1}, "[parts, rows, heads, dim_v]");
  check_dtype(kName, "part_output", a.part_output,
              {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  const std::int64_t parts = a.part_output.shape[0], rows = a.part_output.shape[1];
  const std::int64_t heads = a.part_output.shape[2], dim_v = a.part_output.shape[3];
  WINNOW_CHECK(kName, heads >= 1 && dim_v >= 1,
               "part_output needs at least one head and one channel, got {}",
               shape_text(a.part_output));
  const DType wide = ops::wide_dtype(a.part_output.dtype);
  ops::check_tensor(kName, "part_lse", a.part_lse, wide, {parts, rows, heads},
                    "[parts, rows, heads]");
  ops::check_tensor(kName, "output", a.output,
                    a.output.dtype == DType::kF32 ? DType::kF32 : a.part_output.dtype,
                    {rows, heads, dim_v}, "[rows, heads, dim_v]");
  ops::check_tensor(kName, "lse", a.lse, wide, {rows, heads}, "[rows, heads]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void merge_attention(const MergeAttentionArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t merge_attention_workspace_bytes(const MergeAttentionArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const MergeAttentionArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
