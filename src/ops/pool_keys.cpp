#include "winnow/pool_keys.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "pool_keys";
constexpr const Implementation<PoolKeysArgs>* kList[] = {WINNOW_CUDA_IMPLEMENTATION(pool_keys)
                                                             WINNOW_CPU_IMPLEMENTATIONS(pool_keys) &
                                                         ref::pool_keys_implementation};

void check(const PoolKeysArgs& a) {
  ops::check_gated_keys(kName, a.index_key, a.gate, a.ape, "[keys, index_dim]");
  ops::check_tensor(kName, "pool_bases", a.pool_bases, DType::kI32, {-1}, "[pools]");
  ops::check_tensor(kName, "pooled_key", a.pooled_key, a.index_key.dtype,
                    {a.pool_bases.shape[0], a.index_key.shape[1]}, "[pools, index_dim]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void pool_keys(const PoolKeysArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t pool_keys_workspace_bytes(const PoolKeysArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const PoolKeysArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
