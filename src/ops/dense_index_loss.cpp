#include "winnow/dense_index_loss.h"

#include <cmath>

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "dense_index_loss";
constexpr const Implementation<DenseIndexLossArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(dense_index_loss) WINNOW_CPU_IMPLEMENTATIONS(dense_index_loss) &
    ref::dense_index_loss_implementation};

void check(const DenseIndexLossArgs& a) {
  ops::check_indexer(kName, a.index_query, a.index_key, a.index_weights, a.starts, a.ends);
  ops::check_attention(kName, a.query, a.key, a.starts, a.ends, a.softmax_scale);
  const std::int64_t rows = a.index_query.shape[0], keys = a.index_key.shape[0];
  const DType wide = ops::wide_dtype(a.index_query.dtype);
  check_dtype(kName, "query", a.query, {a.index_query.dtype});
  check_shape(kName, "key", a.key, {keys, -1, -1}, "[keys, kv_heads, dim_qk]");
  check_shape(kName, "lse", a.lse, {rows, a.query.shape[1]}, "[rows, heads]");
  check_dtype(kName, "lse", a.lse, {wide});
  WINNOW_CHECK(kName, std::isfinite(a.d_kl), "d_kl must be finite, got {}", a.d_kl);
  ops::check_tensor(kName, "kl", a.kl, wide, {rows}, "[rows]");
  ops::check_indexer_gradients(kName, a.index_query, a.index_key, a.d_index_query, a.d_index_key,
                               a.d_index_weights);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void dense_index_loss(const DenseIndexLossArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  ops::validate_ranges(kName, args.starts, args.ends, args.index_key.shape[0]);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t dense_index_loss_workspace_bytes(const DenseIndexLossArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const DenseIndexLossArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
