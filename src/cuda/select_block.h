// The k best candidates of a row, exactly, by one block of threads. Where the candidates come from is
// the caller's business (select_row.h streams a row of scores):
//
//   const Selection s{capacity};                   // even, at least k
//   begin_selection<T>(s);                         // by all T threads, as everywhere here
//   offer_lanes<T>(s, k, on, candidate);           // by whole warps; any number, in any order
//   while (make_room<T>(s, k)) {}                  // once, when all have offered all
//   finish_selection<T>(s, k, first, last, words, row);  // what TopkRow says: ids ascending, their
//                                                  // scores, -1 and -inf after them, the length
//
// T, the threads of the block: a multiple of 32, at least 256. A block may select for one row after
// another. All ids lie in [first, last); `row` adds its first_id.
//
// A candidate is (f32 bits of the score, id): see rank.h. NaN must not be offered, nor -inf unless it is
// a candidate; a key that is a member whatever its score is offered with kKept in its id. Ids of a row
// are distinct. The result depends on the candidates alone, not on their order or number.
//
// Candidates wait in a buffer of `capacity`. When it is full, its exact k best stay and the limit
// becomes the rank of the k-th: k candidates reach it, so nothing below can win. The k-th rank is found
// 11 bits at a time by histograms over what is there; the order of ids comes from a bitmap of `words`
// words, window by window where a row is longer.
//
// Shared memory, from the start of the block's dynamic memory: selection_bytes(capacity, words) =
// 1.1 KB + 8 capacity + max(9 KB, 6 words). `words`: a multiple of 128; 4096 cover 131072 ids.
#pragma once

#include "cuda/kth_rank.h"
#include "cuda/topk_output.h"

namespace winnow::cuda {

// Called by every thread when it has offered all, and when what it offers does not fit. False: all
// have offered all. True: the buffer was full, now it holds its k best, and s.limit has risen.
template <int T>
__device__ __noinline__ bool make_room(Selection sel, int k) {
  __syncthreads();
  if (sel.shared().count <= sel.capacity) return false;
  drop_below<T>(sel, sel.capacity, kth_rank<T>(sel, sel.capacity, k, 1, 0));
  return true;
}

// Offers a candidate per lane with `on`, for all lanes of a warp. Then, after the last one that any
// warp offers: `while (make_room<T>(sel, k)) {}`.
template <int T>
__device__ __forceinline__ void offer_lanes(Selection sel, int k, bool on, Candidate c) {
  SelectShared& s = sel.shared();
  for (;;) {
    U32 mask;
    const int base = take_places(&s.count, on, mask), place = base + lanes_below(mask);
    if (mask == 0) return;
    if (on && place < sel.capacity) {
      sel.held()[place] = c;
      on = false;
    }
    if (base + __popc(mask) <= sel.capacity) return;
    make_room<T>(sel, k);
    on = on && rank_of(c) >= s.limit;
  }
}

template <int T>
__device__ __forceinline__ void begin_selection(Selection sel) {
  __syncthreads();  // what this block selected before is written
  for (int i = threadIdx.x; i < kBins / 4; i += T)
    reinterpret_cast<uint4*>(sel.histogram())[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    sel.shared().count = 0;
    sel.shared().limit = 0;
  }
  __syncthreads();
}

// Writes the candidates held that reach `kth` and whose ids lie in [first, last), ids ascending, from
// slot `done` on.
template <int T>
__device__ __forceinline__ void write_members(Selection sel, U64 kth, U32 first, U32 last,
                                              int words, const TopkRow& out, int done) {
  SelectShared& s = sel.shared();
  U32* map = sel.map();
  auto* before = reinterpret_cast<std::uint16_t*>(map + words);  // members of the words below
  const U32 window = 32u * static_cast<U32>(words);
  if (last - first > window && kth != 0) drop_below<T>(sel, s.count, kth);
  const int count = s.count;
  auto each = [&](U32 from, U32 ids, auto visit) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += T) {
      const Candidate c = sel.held()[i];
      const U32 bit = (c.y & ~kKept) - from;
      if (bit < ids && rank_of(c) >= kth) visit(bit, c);
    }
  };
#pragma unroll 1
  for (U32 from = first; from < last; from += window) {
    const U32 ids = min(window, last - from);
    const int here = static_cast<int>(((ids + 31) / 32 + 3) & ~3u);
    __syncthreads();  // the histogram and the window before are dead
#pragma unroll 1
    for (int i = threadIdx.x; i < here / 4; i += T)
      reinterpret_cast<uint4*>(map)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    each(from, ids, [&](U32 bit, Candidate) { atomicOr(&map[bit >> 5], 1u << (bit & 31)); });
    __syncthreads();
#pragma unroll 1
    for (int i0 = 0, set = 0; i0 < here / 4; i0 += T, set ^= 1) {
      const int i = i0 + static_cast<int>(threadIdx.x);
      const uint4 bits =
          i < here / 4 ? reinterpret_cast<const uint4*>(map)[i] : make_uint4(0, 0, 0, 0);
      const int x = __popc(bits.x), xy = x + __popc(bits.y), xyz = xy + __popc(bits.z);
      const int own = xyz + __popc(bits.w), inclusive = warp_inclusive(own);
      if (lane_id() == 31) s.warp_sum[set][warp_id()] = inclusive;
      __syncthreads();
      const int at = done + sum_before<T>(s.warp_sum[set]) + inclusive - own;
      done += sum_of_all<T>(s.warp_sum[set]);
      if (i < here / 4) {
        reinterpret_cast<ushort4*>(before)[i] =
            make_ushort4(static_cast<std::uint16_t>(at), static_cast<std::uint16_t>(at + x),
                         static_cast<std::uint16_t>(at + xy), static_cast<std::uint16_t>(at + xyz));
      }
    }
    __syncthreads();
    each(from, ids, [&](U32 bit, Candidate c) {
      const U32 word = bit >> 5, below = (1u << (bit & 31)) - 1;
      out.put(before[word] + __popc(map[word] & below), c.y & ~kKept, __uint_as_float(c.x));
    });
  }
}

// Writes the k best of what was offered. [a, b]: as in kth_rank.
template <int T>
__device__ __forceinline__ void finish_selection(Selection sel, int k, U32 first, U32 last,
                                                 int words, const TopkRow& out, U64 a = 1,
                                                 U64 b = 0) {
  const int count = sel.shared().count;
  const U64 kth = kth_rank<T>(sel, count, k, a, b);
  write_members<T>(sel, kth, first, last, words, out, 0);
  out.end(min(count, k));
}

}  // namespace winnow::cuda
