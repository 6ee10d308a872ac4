// What the threads of a block share while they select, and their steps on it: places in the buffer,
// minimum and maximum, a histogram and its search. select_block.h puts them together.
#pragma once

#include "cuda/rank.h"

namespace winnow::cuda {

constexpr int kBins = 2048;  // of a histogram: 11 bits
constexpr int kList = 128;   // the candidates of so small a bin are ranked directly
constexpr int kMaxCluster = 16;
constexpr int kMaxMapWords = 4096;

struct alignas(16) SelectShared {
  int warp_sum[2][32];
  U32 warp_min[2][32], warp_max[2][32];
  U64 limit;  // rank below which nothing is kept any more; 0 before the buffer was full
  U64 kth;
  int count;               // candidates held, or wanted to be
  int bin, above, in_bin;  // what find_bin found
  int listed, members;
  int peer_count[kMaxCluster], peer_members[kMaxCluster];  // of the blocks of a cluster
  U64 peer_limit[kMaxCluster];
};

constexpr std::int64_t selection_bytes(int capacity, int words) {
  const std::int64_t histogram = 4 * kBins + 8 * kList, map = 6 * words;
  return static_cast<std::int64_t>(sizeof(SelectShared)) + 8ll * capacity +
         (map > histogram ? map : histogram);
}

extern __shared__ __align__(16) unsigned char selection_memory[];

struct Selection {
  int capacity;  // even

  __device__ SelectShared& shared() const {
    return *reinterpret_cast<SelectShared*>(selection_memory);
  }
  __device__ Candidate* held() const {
    return reinterpret_cast<Candidate*>(selection_memory + sizeof(SelectShared));
  }
  // Zero between uses; dead, with the list, when the map is used.
  __device__ int* histogram() const { return reinterpret_cast<int*>(held() + capacity); }
  __device__ U64* list() const { return reinterpret_cast<U64*>(histogram() + kBins); }
  __device__ U32* map() const { return reinterpret_cast<U32*>(histogram()); }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_id() { return threadIdx.x >> 5; }
__device__ __forceinline__ int lanes_below(U32 mask) {
  return __popc(mask & ((1u << lane_id()) - 1));
}

__device__ __forceinline__ int warp_inclusive(int v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
    asm("{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, %0, %1, 0, -1;"
        " @p add.s32 %0, %0, t; }"
        : "+r"(v)
        : "r"(d));
  return v;
}
// Of the numbers that the warps left in `of_warps`: the sum of those before this warp, and of all.
template <int T>
__device__ __forceinline__ int sum_before(const int* of_warps) {
  return __reduce_add_sync(kAllLanes, lane_id() < warp_id() ? of_warps[lane_id()] : 0);
}
template <int T>
__device__ __forceinline__ int sum_of_all(const int* of_warps) {
  return __reduce_add_sync(kAllLanes, lane_id() < T / 32 ? of_warps[lane_id()] : 0);
}

// A place for each lane with `on`, from a counter in shared memory, for all lanes of a warp.
__device__ __forceinline__ int take_places(int* counter, bool on, U32& mask) {
  mask = __ballot_sync(kAllLanes, on);
  int base = 0;
  if (mask != 0 && lane_id() == 0) base = atomicAdd(counter, __popc(mask));
  return __shfl_sync(kAllLanes, base, 0);
}

// Minimum and maximum over the block. One barrier; `set` alternates, so that no second one is needed.
template <int T>
__device__ __forceinline__ void block_minmax(Selection sel, int set, U32& least, U32& most) {
  SelectShared& s = sel.shared();
  least = __reduce_min_sync(kAllLanes, least);
  most = __reduce_max_sync(kAllLanes, most);
  if (lane_id() == 0) {
    s.warp_min[set][warp_id()] = least;
    s.warp_max[set][warp_id()] = most;
  }
  __syncthreads();
  const int lane = lane_id();
  least = __reduce_min_sync(kAllLanes, lane < T / 32 ? s.warp_min[set][lane] : kAllLanes);
  most = __reduce_max_sync(kAllLanes, lane < T / 32 ? s.warp_max[set][lane] : 0u);
}

// Counts an element per lane. A plateau puts a warp into one bin: that of the first lane is added once.
__device__ __forceinline__ void count_bin(int* histogram, bool on, int bin) {
  const int first = __shfl_sync(kAllLanes, bin, 0);
  const U32 same = __ballot_sync(kAllLanes, on && bin == first);
  if (on && bin != first) atomicAdd(&histogram[bin], 1);
  if (same != 0 && lane_id() == 0) atomicAdd(&histogram[first], __popc(same));
}

// The bin, from the top, in which the need-th element lies: s.bin, -1 if there are fewer. Zeroes the
// histogram. Eight warps work, whatever the size of the block: instructions are what this costs.
template <int T>
__device__ __forceinline__ void find_bin(Selection sel, int need) {
  constexpr int kOwn = kBins / 256;
  SelectShared& s = sel.shared();
  const bool works = threadIdx.x < 256;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
  uint4 x = make_uint4(0, 0, 0, 0), y = x;
  int sum = 0, inclusive = 0;
  if (works) {
    uint4* own = reinterpret_cast<uint4*>(sel.histogram() + top - 7);
    x = own[0];
    y = own[1];
    own[0] = own[1] = make_uint4(0, 0, 0, 0);
    sum = static_cast<int>(x.x + x.y + x.z + x.w + y.x + y.y + y.z + y.w);
    inclusive = warp_inclusive(sum);
    if (lane_id() == 31) s.warp_sum[0][warp_id()] = inclusive;
    if (threadIdx.x == 0) s.bin = -1;
  }
  __syncthreads();
  if (works) {
    int before = sum_before<T>(s.warp_sum[0]) + inclusive - sum;
    if (before < need && need <= before + sum) {
      const U32 counts[kOwn] = {y.w, y.z, y.y, y.x, x.w, x.z, x.y, x.x};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int count = static_cast<int>(counts[i]);
        if (before < need && need <= before + count) {
          s.bin = top - i;
          s.above = before;
          s.in_bin = count;
        }
        before += count;
      }
    }
  }
  __syncthreads();
}

}  // namespace winnow::cuda
