// The rank of the k-th best of the candidates that a block holds: histograms of 11 bits a pass over a
// range narrowed to what is there, until a bin ends at the k-th or few enough are left to compare all
// with all. Any data ends within six passes; ordinary scores take one.
#pragma once

#include "cuda/selection.h"

namespace winnow::cuda {

// Calls visit(rank) for the m candidates held whose ranks lie in [low, high].
template <int T, class Visit>
__device__ __forceinline__ void each_rank(Selection sel, int m, U64 low, U64 high, Visit visit) {
#pragma unroll 1
  for (int i = threadIdx.x; i < m; i += T) {
    const U64 rank = rank_of(sel.held()[i]);
    if (rank >= low && rank <= high) visit(rank);
  }
}

// Where the ranks in [low, high] lie: [a, b], empty (a > b) where there are none.
template <int T>
__device__ __forceinline__ void narrow(Selection sel, int m, U64 low, U64 high, U64& a, U64& b) {
  U32 least = kAllLanes, most = 0;
  each_rank<T>(sel, m, low, high, [&](U64 rank) {
    least = min(least, key_in(rank));
    most = max(most, key_in(rank));
  });
  block_minmax<T>(sel, 0, least, most);
  a = rank_at(least, 0);
  b = rank_at(most, kAllLanes);
  if (least != most) return;
  U32 lowest = kAllLanes, highest = 0;  // a plateau, told apart by id
  each_rank<T>(sel, m, low, high, [&](U64 rank) {
    lowest = min(lowest, static_cast<U32>(rank));
    highest = max(highest, static_cast<U32>(rank));
  });
  block_minmax<T>(sel, 1, lowest, highest);
  a = rank_at(least, lowest);
  b = rank_at(least, highest);
}

// The rank of the k-th best of the m candidates held; 0 where m <= k. All threads get it.
// [a, b]: where most of them lie, a guess that spares a pass; a > b: no guess.
template <int T>
__device__ __noinline__ U64 kth_rank(Selection sel, int m, int k, U64 a, U64 b) {
  if (m <= k) return 0;
  SelectShared& s = sel.shared();
  U64 low = 0, high = ~U64{0};
  int need = k;
  for (;;) {
    if (a > b) narrow<T>(sel, m, low, high, a, b);  // 2048 bins then resolve any scale
    const int shift = max(0, 64 - __clzll(static_cast<long long>(b - a)) - 11);
#pragma unroll 2
    for (int i0 = warp_id() * 32; i0 < m; i0 += T) {
      const int i = i0 + lane_id();
      const U64 rank = i < m ? rank_of(sel.held()[i]) : 0;
      const U64 bin = rank < a ? 0 : (rank - a) >> shift;
      count_bin(sel.histogram(), i < m && rank >= low && rank <= high,
                static_cast<int>(bin < kBins ? bin : kBins - 1));
    }
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    find_bin<T>(sel, need);
    const int bin = s.bin, in_bin = s.in_bin;
    need -= s.above;
    if (bin < kBins - 1) {
      const U64 last = a + (static_cast<U64>(bin + 1) << shift) - 1;
      high = last < high ? last : high;
    }
    if (bin > 0) {
      const U64 first = a + (static_cast<U64>(bin) << shift);
      low = first > low ? first : low;
    }
    if (in_bin == need) return low;  // the whole bin is in
    if (in_bin <= kList) break;
    a = 1;
    b = 0;
  }
  each_rank<T>(sel, m, low, high, [&](U64 rank) { sel.list()[atomicAdd(&s.listed, 1)] = rank; });
  __syncthreads();
  const int n = s.listed;
  if (static_cast<int>(threadIdx.x) < n) {
    const U64 rank = sel.list()[threadIdx.x];
    int better = 0;
#pragma unroll 2
    for (int j = 0; j < n; ++j) better += sel.list()[j] > rank ? 1 : 0;
    if (better == need - 1) s.kth = rank;
  }
  __syncthreads();
  return s.kth;
}

// Keeps, in place, the candidates that reach the limit, of the m that are held.
template <int T>
__device__ __noinline__ void drop_below(Selection sel, int m, U64 limit) {
  SelectShared& s = sel.shared();
  if (threadIdx.x == 0) s.listed = 0;
  __syncthreads();
#pragma unroll 1
  for (int i0 = 0; i0 < m; i0 += T) {  // what is written lies below what has been read
    const int i = i0 + static_cast<int>(threadIdx.x);
    const Candidate c = i < m ? sel.held()[i] : make_uint2(0, 0);
    __syncthreads();
    U32 mask;
    const bool stays = i < m && rank_of(c) >= limit;
    const int base = take_places(&s.listed, stays, mask);
    if (stays) sel.held()[base + lanes_below(mask)] = c;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    s.count = s.listed;
    s.limit = limit;
  }
  __syncthreads();
}

}  // namespace winnow::cuda
