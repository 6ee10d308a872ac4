// The tokens of each selected pool that the row sees, then the tail of its range.
#include "winnow/expand_pools.h"

#include "ref/implementations.h"
#include "ref/reader.h"

namespace winnow::ref {
namespace {

// The first token of a pool; -1 for an id of no pool.
std::int64_t base_of(const ExpandPoolsArgs& a, std::int64_t pool) {
  if (pool < 0) return -1;
  if (a.pool_bases.empty()) return pool * a.pool_size;
  if (pool >= a.pool_bases.shape[0]) return -1;
  return a.pool_bases.as<std::int32_t>()[pool * a.pool_bases.strides[0]];
}

void run(const ExpandPoolsArgs& a, Workspace) {
  constexpr std::int64_t kAnyToken = INT64_MAX;  // the number of tokens is not known here
  const std::int64_t selected = a.pool_indices.shape[1];
  for (std::int64_t i = 0; i < a.topk_indices.shape[0]; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, kAnyToken);
    const std::int64_t tail = a.always_select_tail ? range.length() % a.pool_size : 0;
    std::int64_t count = 0;
    const auto put = [&](std::int64_t token) {
      a.topk_indices
          .as<std::int32_t>()[i * a.topk_indices.strides[0] + count++ * a.topk_indices.strides[1]] =
          static_cast<std::int32_t>(token);
    };
    for (std::int64_t s = 0; s < selected; ++s) {
      const std::int64_t base = base_of(a, get_id(a.pool_indices, i, s));
      if (base < 0) continue;
      for (std::int64_t t = 0; t < a.pool_size; ++t) {
        if (base + t >= range.start && base + t < range.end - tail) put(base + t);
      }
    }
    for (std::int64_t token = range.end - tail; token < range.end; ++token) put(token);
    a.topk_lengths.as<std::int32_t>()[i * a.topk_lengths.strides[0]] =
        static_cast<std::int32_t>(count);
    while (count < a.topk_indices.shape[1]) put(-1);
  }
}

}  // namespace

const Implementation<ExpandPoolsArgs> expand_pools_implementation = {"reference", accept,
                                                                     no_workspace, run};

}  // namespace winnow::ref
