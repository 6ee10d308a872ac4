// How the scorer's work is shared out: the list (block of rows, tile of keys) of each chunk of keys, of
// which every block of threads takes an equal, contiguous share.
#pragma once

#include "cuda/scorer.h"

namespace winnow::cuda::sm90 {

inline constexpr int kKeys = 64;  // of a tile
// Tiles of a chunk, which all rows see before the next: they stay in the L2.
inline constexpr std::int64_t kChunkTiles = 4096;

// Of each chunk of keys: for every block of rows, the tiles before it and its first one; [blocks + 1].
static __global__ void __launch_bounds__(1024)
    plan_kernel(const __grid_constant__ Scorer s, int rows_of_block, int blocks, int2* plan) {
  __shared__ int sums[1024];
  const int t = threadIdx.x;
  const std::int64_t first = s.first_key / kKeys + blockIdx.x * kChunkTiles;
  const std::int64_t last = first + kChunkTiles;
  plan += static_cast<std::int64_t>(blockIdx.x) * (blocks + 1);
  int before = 0;
  for (int base = 0; base <= blocks; base += 1024) {
    const int block = base + t;
    std::int64_t start = INT64_MAX, end = 0;
    for (int r = 0; r < rows_of_block && block < blocks; ++r) {
      const std::int64_t row = s.first_row + static_cast<std::int64_t>(block) * rows_of_block + r;
      if (row >= s.last_row) break;
      const Range visible = s.visible(row);
      if (visible.length() == 0) continue;
      start = min(start, visible.start);
      end = max(end, visible.end);
    }
    const std::int64_t from = max(start / kKeys, first);
    const std::int64_t to = min((end + kKeys - 1) / kKeys, last);
    const int n = to > from ? static_cast<int>(to - from) : 0;
    sums[t] = n;
    __syncthreads();
    for (int d = 1; d < 1024; d *= 2) {
      const int x = t >= d ? sums[t - d] : 0;
      __syncthreads();
      sums[t] += x;
      __syncthreads();
    }
    if (block <= blocks) plan[block] = make_int2(before + sums[t] - n, static_cast<int>(from));
    before += sums[1023];
    __syncthreads();
  }
}

struct Plan {
  const int2* entries;
  int chunks, blocks;
};

// A run of tiles of one block of rows.
struct Run {
  int block, tile, tiles;
};

// Walks this block's share of the plan; every warp walks it alike.
class Walk {
 public:
  __device__ explicit Walk(const Plan& plan) : plan_(plan) {}
  __device__ bool next(Run& run) {
    while (position_ >= end_) {
      if (++chunk_ >= plan_.chunks) return false;
      entries_ = plan_.entries + static_cast<std::int64_t>(chunk_) * (plan_.blocks + 1);
      const std::int64_t total = __ldg(&entries_[plan_.blocks].x);
      position_ = static_cast<int>(total * blockIdx.x / gridDim.x);
      end_ = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
      int low = 0, high = plan_.blocks;  // the last block that begins at or before the position
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (__ldg(&entries_[middle].x) <= position_ ? low : high) = middle;
      }
      block_ = low;
    }
    int2 here = __ldg(&entries_[block_]);
    int stop = __ldg(&entries_[block_ + 1].x);
    while (stop <= position_) {
      ++block_;
      here = __ldg(&entries_[block_]);
      stop = __ldg(&entries_[block_ + 1].x);
    }
    run = {block_, here.y + position_ - here.x, min(stop, end_) - position_};
    position_ += run.tiles;
    return true;
  }

 private:
  const Plan& plan_;
  const int2* entries_ = nullptr;
  int chunk_ = -1, block_ = 0, position_ = 0, end_ = 0;
};

}  // namespace winnow::cuda::sm90
