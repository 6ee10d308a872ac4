#include "winnow/append_pools.h"

#include <algorithm>
#include <vector>

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"
#include "ops/values.h"

namespace winnow {
namespace {

constexpr char kName[] = "append_pools";
constexpr const Implementation<AppendPoolsArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(append_pools) WINNOW_CPU_IMPLEMENTATIONS(append_pools) &
    ref::append_pools_implementation};

// A view that was built for pages of another number of pools would take every slot for another.
void check_destination(const AppendPoolsArgs& a) {
  const std::int64_t pool_size = a.ape.shape[0], dim = a.index_key.shape[1];
  if (a.pooled_key.rank != 3) {
    check_shape(kName, "pooled_key", a.pooled_key, {-1, dim}, "[slots, index_dim]");
    WINNOW_CHECK(kName, a.page_size == 0,
                 "page_size must be 0 where pooled_key has no pages, got {}", a.page_size);
  } else {
    WINNOW_CHECK(kName, a.page_size >= 1 && a.page_size % pool_size == 0,
                 "page_size must be a positive multiple of pool_size {}, got {}", pool_size,
                 a.page_size);
    check_shape(kName, "pooled_key", a.pooled_key, {-1, a.page_size / pool_size, dim},
                "[pages, page_size / pool_size, index_dim]");
  }
  check_dtype(kName, "pooled_key", a.pooled_key, {a.index_key.dtype});
}

void check(const AppendPoolsArgs& a) {
  ops::check_gated_keys(kName, a.index_key, a.gate, a.ape, "[tokens, index_dim]");
  const std::int64_t tokens = a.index_key.shape[0], pool_size = a.ape.shape[0];
  ops::check_tensor(kName, "context", a.context, DType::kI32, {-1}, "[requests]");
  const std::int64_t requests = a.context.shape[0];
  ops::check_tensor(kName, "cu_seqlens", a.cu_seqlens, DType::kI32, {requests + 1},
                    "[requests + 1]");
  if (!a.rings.empty())
    ops::check_tensor(kName, "rings", a.rings, DType::kI32, {requests}, "[requests]");
  ops::check_tensor(kName, "pool_slots", a.pool_slots, DType::kI32, {tokens}, "[tokens]");
  ops::check_tensor(kName, "open_key", a.open_key, a.index_key.dtype,
                    {-1, pool_size - 1, a.index_key.shape[1]}, "[rings, pool_size - 1, index_dim]");
  ops::check_tensor(kName, "open_gate", a.open_gate, a.index_key.dtype,
                    {a.open_key.shape[0], pool_size - 1, a.index_key.shape[1]},
                    "[rings, pool_size - 1, index_dim]");
  check_destination(a);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

std::int64_t number(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}

void validate_once(std::vector<std::int64_t>* ids, const char* rule) {
  std::sort(ids->begin(), ids->end());
  const auto twice = std::adjacent_find(ids->begin(), ids->end());
  WINNOW_CHECK(kName, twice == ids->end(), "{}, got {} twice", rule, *twice);
}

// Requests whose tokens follow each other, with rings of their own; pools with slots of their own.
void validate(const AppendPoolsArgs& a) {
  if (!ops::validates(a.context)) return;
  const std::int64_t pool_size = a.ape.shape[0], tokens = a.index_key.shape[0];
  std::vector<std::int64_t> rings, slots;
  for (std::int64_t r = 0; r < a.context.shape[0]; ++r) {
    const std::int64_t first = number(a.cu_seqlens, r), last = number(a.cu_seqlens, r + 1);
    WINNOW_CHECK(kName, first >= 0 && first <= last && last <= tokens,
                 "cu_seqlens must ascend within {} tokens, got {} after {} at request {}", tokens,
                 last, first, r);
    const std::int64_t ring = a.rings.empty() ? r : number(a.rings, r);
    const std::int64_t context = number(a.context, r);
    if (ring < 0 || ring >= a.open_key.shape[0] || context < 0) continue;
    rings.push_back(ring);
    for (std::int64_t i = first; i < last; ++i) {
      if ((context + i - first) % pool_size == pool_size - 1 && number(a.pool_slots, i) >= 0)
        slots.push_back(number(a.pool_slots, i));
    }
  }
  validate_once(&rings, "requests must have rings of their own");
  validate_once(&slots, "pools must have slots of their own");
}

}  // namespace

void append_pools(const AppendPoolsArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  validate(args);
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t append_pools_workspace_bytes(const AppendPoolsArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const AppendPoolsArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
