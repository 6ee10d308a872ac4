// expand_pools on GPUs: a warp for each row takes 32 pools at a time; a prefix sum over their
// tokens says where each pool's go. No arithmetic; bound by memory.
#include "winnow/expand_pools.h"

#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "cuda/rows.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 4;  // of a block, a row each
constexpr std::int64_t kAnyToken = std::int64_t{1} << 62;  // the number of tokens is not known here
constexpr unsigned kAll = 0xffffffffu;

struct Expansion {
  const std::int32_t* pool_indices;
  std::int64_t pool_row, pool_column, selected;
  IntRows bases;  // null: pool p begins at p * pool_size
  std::int64_t pools;
  RowRanges ranges;
  std::int64_t rows, pool_size;
  bool always_select_tail;
  std::int32_t* topk_indices;
  std::int64_t out_row, width;
  std::int32_t* topk_lengths;
  std::int64_t length_stride;
};

__global__ void __launch_bounds__(32 * kWarps) expand_rows(Expansion e) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= e.rows) return;
  const int lane = threadIdx.x % 32;
  const Range range = e.ranges[row];
  const std::int64_t tail = e.always_select_tail ? range.length() % e.pool_size : 0;
  const std::int64_t end = range.end - tail;  // of complete pools
  std::int32_t* list = e.topk_indices + row * e.out_row;
  std::int64_t count = 0;
  for (std::int64_t s = 0; s < e.selected; s += 32) {
    std::int64_t first = 0, last = 0;  // the tokens of this lane's pool
    if (s + lane < e.selected) {
      const std::int64_t pool = e.pool_indices[row * e.pool_row + (s + lane) * e.pool_column];
      const bool known = pool >= 0 && pool < e.pools;
      const std::int64_t base = !known                  ? -1
                                : e.bases.data == nullptr ? pool * e.pool_size
                                                          : e.bases[pool];
      if (base >= 0) {
        first = base > range.start ? base : range.start;
        last = base + e.pool_size < end ? base + e.pool_size : end;
      }
    }
    const std::int64_t n = last > first ? last - first : 0;
    std::int64_t before = n;
    for (int step = 1; step < 32; step *= 2) {
      const std::int64_t other = __shfl_up_sync(kAll, before, step);
      if (lane >= step) before += other;
    }
    const std::int64_t all = __shfl_sync(kAll, before, 31);
    std::int32_t* out = list + count + before - n;
    for (std::int64_t t = 0; t < n; ++t) out[t] = static_cast<std::int32_t>(first + t);
    count += all;
  }
  for (std::int64_t t = lane; t < tail; t += 32)
    list[count + t] = static_cast<std::int32_t>(end + t);
  count += tail;
  if (lane == 0) e.topk_lengths[row * e.length_stride] = static_cast<std::int32_t>(count);
  for (std::int64_t s = count + lane; s < e.width; s += 32) list[s] = -1;
}

const Kernel kExpand{expand_rows};

Refusal refuse(const ExpandPoolsArgs& a) {
  if (!has_unit_stride(a.topk_indices)) return "topk_indices must have stride 1 on its last axis";
  return {};
}

std::int64_t workspace_bytes(const ExpandPoolsArgs&) { return 0; }

void run(const ExpandPoolsArgs& a, Workspace workspace) {
  const bool with_bases = !a.pool_bases.empty();
  const Expansion e{a.pool_indices.as<std::int32_t>(),
                    a.pool_indices.strides[0],
                    a.pool_indices.strides[1],
                    a.pool_indices.shape[1],
                    with_bases ? IntRows(a.pool_bases) : IntRows(),
                    with_bases ? a.pool_bases.shape[0] : kAnyToken,
                    RowRanges(a.starts, a.ends, kAnyToken),
                    a.topk_indices.shape[0],
                    a.pool_size,
                    a.always_select_tail,
                    a.topk_indices.as<std::int32_t>(),
                    a.topk_indices.strides[0],
                    a.topk_indices.shape[1],
                    a.topk_lengths.as<std::int32_t>(),
                    a.topk_lengths.strides[0]};
  kExpand.launch("expand_pools",
                 {.grid = dim3(static_cast<unsigned>(ceil_div(e.rows, kWarps))),
                  .block = dim3(32 * kWarps),
                  .stream = stream_of(workspace)},
                 e);
}

}  // namespace

extern const Implementation<ExpandPoolsArgs> expand_pools_implementation;
const Implementation<ExpandPoolsArgs> expand_pools_implementation = {"cuda.portable", refuse,
                                                                     workspace_bytes, run};

}  // namespace winnow::cuda
