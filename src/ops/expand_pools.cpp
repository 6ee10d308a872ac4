#include "winnow/expand_pools.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "expand_pools";
constexpr const Implementation<ExpandPoolsArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(expand_pools) WINNOW_CPU_IMPLEMENTATIONS(expand_pools) &
    ref::expand_pools_implementation};

void check(const ExpandPoolsArgs& a) {
  constexpr std::int64_t kMostPool = (std::int64_t{1} << 31) - 1;
  WINNOW_CHECK(kName, a.pool_size >= 1 && a.pool_size <= kMostPool,
               "pool_size must be from 1 to {}, got {}", kMostPool, a.pool_size);
  check_shape(kName, "pool_indices", a.pool_indices, {-1, -1}, "[rows, topk / pool_size]");
  check_dtype(kName, "pool_indices", a.pool_indices, {DType::kI32});
  const std::int64_t rows = a.pool_indices.shape[0];
  if (!a.pool_bases.empty()) {
    ops::check_tensor(kName, "pool_bases", a.pool_bases, DType::kI32, {-1}, "[pools]");
  }
  ops::check_ranges(kName, a.starts, a.ends, rows);
  check_shape(kName, "topk_indices", a.topk_indices, {rows, -1}, "[rows, topk and tail]");
  check_dtype(kName, "topk_indices", a.topk_indices, {DType::kI32});
  const std::int64_t tail = a.always_select_tail ? a.pool_size - 1 : 0,
                     topk = a.topk_indices.shape[1] - tail;
  WINNOW_CHECK(kName, topk >= a.pool_size && topk % a.pool_size == 0,
               "topk must be a positive multiple of pool_size {}, got {} ({} columns{})",
               a.pool_size, topk, a.topk_indices.shape[1],
               tail > 0 ? fmt::format(", {} of them for the tail", tail) : "");
  WINNOW_CHECK(kName, a.pool_indices.shape[1] == topk / a.pool_size,
               "pool_indices must have topk / pool_size = {} columns, got {}", topk / a.pool_size,
               a.pool_indices.shape[1]);
  ops::check_tensor(kName, "topk_lengths", a.topk_lengths, DType::kI32, {rows}, "[rows]");
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

// Ranges, and ids that are -1 or pools, ascending, that share no token.
void validate(const ExpandPoolsArgs& a) {
  if (!ops::validates(a.starts)) return;
  ops::validate_ranges(kName, a.starts, a.ends, ops::kAnyKey);
  const Tensor &ids = a.pool_indices, &bases = a.pool_bases;
  const std::int64_t pools = bases.empty() ? ops::kAnyKey / a.pool_size : bases.shape[0];
  for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
    std::int64_t free = 0;  // the first token that no pool of the row has yet
    for (std::int64_t s = 0; s < ids.shape[1]; ++s) {
      const std::int64_t id = ids.as<std::int32_t>()[i * ids.strides[0] + s * ids.strides[1]];
      if (id == -1) continue;
      WINNOW_CHECK(kName, id >= 0 && id < pools,
                   "pool_indices must be -1 or one of {} pools, got {} in row {} slot {}", pools,
                   id, i, s);
      const std::int64_t base =
          bases.empty() ? id * a.pool_size : bases.as<std::int32_t>()[id * bases.strides[0]];
      WINNOW_CHECK(kName, base >= free,
                   "the pools of a row must ascend and share no token, got pool {} from token {} "
                   "behind token {} in row {}",
                   id, base, free - 1, i);
      free = base + a.pool_size;
    }
  }
}

}  // namespace

void expand_pools(const ExpandPoolsArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  validate(args);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t expand_pools_workspace_bytes(const ExpandPoolsArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const ExpandPoolsArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
