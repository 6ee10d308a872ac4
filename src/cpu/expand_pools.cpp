// expand_pools on CPUs: tasks of 16 rows; the tokens of a pool are stored eight at a time.
//
// A whole pool is stored in vectors that may reach past it, but not past the row: what they leave
// there is overwritten by the next pool, the tail or -1. Bytes: a pool reads its id and its base
// and writes pool_size ids; no arithmetic.
#include "winnow/expand_pools.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/row_range.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskRows = 16;
constexpr std::int64_t kAnyToken = INT64_MAX;  // the number of tokens is not known here

Refusal refuse(const ExpandPoolsArgs& a) {
  if (!has_unit_stride(a.topk_indices)) return "topk_indices must have stride 1 on its last axis";
  return {};
}

std::int64_t workspace_bytes(const ExpandPoolsArgs&) { return 0; }

// The first token of a pool; -1 for an id of no pool.
struct Bases {
  const std::int32_t* base;  // null: pool_bases is left out
  std::int64_t pools, stride, pool_size;

  explicit Bases(const ExpandPoolsArgs& a)
      : base(a.pool_bases.empty() ? nullptr : a.pool_bases.as<std::int32_t>()),
        pools(a.pool_bases.empty() ? kAnyToken : a.pool_bases.shape[0]),
        stride(a.pool_bases.strides[0]),
        pool_size(a.pool_size) {}
  WINNOW_INLINE std::int64_t operator()(std::int64_t pool) const {
    if (pool < 0 || pool >= pools) return -1;
    return base == nullptr ? pool * pool_size : base[pool * stride];
  }
};

// The tokens first, ..., first + 7. Those of an int's end that nobody keeps may wrap.
WINNOW_INLINE void store_run(std::int32_t* list, std::int64_t first) {
  using U8 = std::uint32_t __attribute__((vector_size(32)));
  const auto t = static_cast<std::uint32_t>(first);
  store(list, U8{t, t, t, t, t, t, t, t} + U8{0, 1, 2, 3, 4, 5, 6, 7});
}

// Tokens [first, last) at list[count, ...), in vectors where these end within `width`.
WINNOW_INLINE std::int64_t put(std::int32_t* list, std::int64_t count, std::int64_t width,
                               std::int64_t first, std::int64_t last) {
  const std::int64_t n = last - first;
  std::int64_t t = 0;
  for (; t < n && count + t + 8 <= width; t += 8) store_run(list + count + t, first + t);
  for (; t < n; ++t) list[count + t] = static_cast<std::int32_t>(first + t);
  return count + max64(n, 0);
}

void expand_row(const ExpandPoolsArgs& a, std::int64_t i) {
  const RowRange range = row_range(a.starts, a.ends, i, kAnyToken);
  const std::int64_t width = a.topk_indices.shape[1], selected = a.pool_indices.shape[1];
  const std::int64_t tail = a.always_select_tail ? range.length() % a.pool_size : 0;
  const std::int64_t pool_size = a.pool_size, end = range.end - tail;
  const std::int64_t stride = a.pool_indices.strides[1];
  const std::int32_t* pool = a.pool_indices.as<std::int32_t>() + i * a.pool_indices.strides[0];
  std::int32_t* list = a.topk_indices.as<std::int32_t>() + i * a.topk_indices.strides[0];
  const Bases base_of(a);
  std::int64_t count = 0;
  for (std::int64_t s = 0; s < selected; ++s) {
    const std::int64_t base = base_of(pool[s * stride]);
    if (base < 0) continue;
    if (pool_size <= 8 && base >= range.start && base + pool_size <= end && count + 8 <= width) {
      store_run(list + count, base);
      count += pool_size;
    } else {
      count = put(list, count, width, max64(base, range.start), min64(base + pool_size, end));
    }
  }
  count = put(list, count, width, end, range.end);
  a.topk_lengths.as<std::int32_t>()[i * a.topk_lengths.strides[0]] =
      static_cast<std::int32_t>(count);
  for (std::int64_t s = count; s < width; ++s) list[s] = -1;
}

void run(const ExpandPoolsArgs& a, Workspace) {
  const std::int64_t rows = a.topk_indices.shape[0];
  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int) {
    for (std::int64_t i = task * kTaskRows; i < min64(rows, (task + 1) * kTaskRows); ++i)
      expand_row(a, i);
  });
}

}  // namespace

extern const Implementation<ExpandPoolsArgs> expand_pools_implementation;
const Implementation<ExpandPoolsArgs> expand_pools_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                     refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
