// A row of scores, streamed into a selection once.
//
// A sample gives a rank that somewhat more than k scores reach; the pass over the row then offers what
// reaches it. The sample only guesses where to start: too low, and the buffer is cut more often; too
// high, and fewer than k came, so the row is taken again from the lowest rank. Slower both, never wrong.
#pragma once

#include "base/numbers.h"
#include "cuda/select_block.h"

namespace winnow::cuda {

constexpr int kChunks = 4;  // that a thread holds: 64 bytes in flight

// Columns [first, last) of a row as chunks of 16 aligned bytes. Element e of chunk c is column
// c * kPerChunk + e - head; chunks [begin, end) lie wholly inside.
template <class E>
struct Row {
  static constexpr int kPerChunk = 16 / sizeof(E);
  const E* chunks;  // begins up to kPerChunk - 1 elements before the row
  int head, begin, end;
  U32 first, last;

  __device__ Row(const E* row, U32 first_column, U32 last_column)
      : head(static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / sizeof(E) % kPerChunk)),
        first(first_column),
        last(last_column) {
    chunks = row - head;
    begin = static_cast<int>((first + head + kPerChunk - 1) / kPerChunk);
    end = max(begin, static_cast<int>((last + head) / kPerChunk));
  }
  __device__ __forceinline__ uint4 chunk(int c) const {
    return __ldcs(reinterpret_cast<const uint4*>(chunks) + c);
  }
  __device__ __forceinline__ U32 column(int c) const {
    return static_cast<U32>(c) * kPerChunk - static_cast<U32>(head);
  }
  __device__ __forceinline__ float at(U32 column_of) const {
    return to_float(chunks[static_cast<std::int64_t>(column_of) + head]);
  }
};

// The f32 bits of element e of a chunk.
template <class E>
__device__ __forceinline__ U32 bits_at(const uint4& q, int e) {
  constexpr int kPerWord = 4 / sizeof(E);
  const int i = e / kPerWord;
  const U32 word = i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
  if constexpr (std::is_same_v<E, float>) return word;
  if constexpr (std::is_same_v<E, BF16>) return e % 2 != 0 ? word & 0xffff0000u : word << 16;
  if constexpr (std::is_same_v<E, F16>) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<std::uint16_t>(word >> e % 2 * 16)));
    return __float_as_uint(x);
  }
}

template <class E, int T>
__device__ __forceinline__ void load_tile(uint4 (&q)[kChunks], const Row<E>& row, int c, int end) {
  const int own = c + static_cast<int>(threadIdx.x);
  if (c + kChunks * T <= end) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) q[i] = row.chunk(own + i * T);
  } else {  // absent chunks read as NaN, which reaches nothing
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      q[i] = make_uint4(kAllLanes, kAllLanes, kAllLanes, kAllLanes);
      if (own + i * T < end) q[i] = row.chunk(own + i * T);
    }
  }
}

// Which ends of a row a block of its cluster owns.
constexpr int kFront = 1, kBack = 2;

// Offers the elements before the first whole chunk and after the last: one warp, fewer than two chunks.
template <class E, int T>
__device__ __forceinline__ void offer_ragged(Selection sel, const Row<E>& row, int ends, int k,
                                             U64 limit) {
  constexpr U32 kPerChunk = Row<E>::kPerChunk;
  if (warp_id() != 0) return;
  const U32 lane = lane_id();
  const U32 body = min(row.last, row.column(row.begin)), tail = max(body, row.column(row.end));
  const bool front = lane < kPerChunk;
  const U32 id = front ? row.first + lane : tail + lane - kPerChunk;
  const bool on = front ? (ends & kFront) != 0 && id < body
                        : (ends & kBack) != 0 && lane < 2 * kPerChunk && id < row.last;
  const float x = on ? row.at(id) : 0;
  offer_lanes<T>(sel, k, on && x >= threshold(limit, id), make_uint2(__float_as_uint(x), id));
}

// Offers the keys [first, last), members whatever their score unless it is NaN.
template <class E, int T>
__device__ __forceinline__ void offer_kept(Selection sel, const Row<E>& row, int k, U32 first,
                                           U32 last) {
#pragma unroll 1
  for (U32 i0 = first + static_cast<U32>(warp_id()) * 32; i0 < last; i0 += T) {
    const U32 id = i0 + static_cast<U32>(lane_id());
    const float x = id < last ? row.at(id) : NAN;
    offer_lanes<T>(sel, k, x == x, make_uint2(__float_as_uint(x), id | kKept));
  }
}

// The rest of a tile that did not fit: q holds the thread's chunks, the first at column `id`; the warp
// has taken `total` places from `base` on, this lane those from `place`. Returns the limit afterwards.
template <class E, int T>
__device__ __noinline__ U64 offer_slowly(Selection sel, int k, const uint4* q, U32 id, U64 limit,
                                         int base, int total, int place) {
  constexpr int kPerChunk = Row<E>::kPerChunk, kOwn = kChunks * kPerChunk;
  U32 done = 0;
  auto each = [&](auto visit) {
#pragma unroll 1
    for (int j = 0; j < kOwn; ++j) {
      const U32 at = id + static_cast<U32>(j / kPerChunk * T * kPerChunk);
      const U32 bits = bits_at<E>(q[j / kPerChunk], j % kPerChunk);
      if ((done >> j & 1) == 0 && __uint_as_float(bits) >= threshold(limit, at))
        visit(j, make_uint2(bits, at + static_cast<U32>(j % kPerChunk)));
    }
  };
  for (;;) {
    each([&](int j, Candidate c) {
      if (place < sel.capacity) {
        sel.held()[place] = c;
        done |= 1u << j;
      }
      ++place;
    });
    if (base + total <= sel.capacity) return limit;
    make_room<T>(sel, k);
    limit = sel.shared().limit;
    int count = 0;
    each([&](int, Candidate) { ++count; });
    const int inclusive = warp_inclusive(count);
    total = __shfl_sync(kAllLanes, inclusive, 31);
    if (total == 0) return limit;
    if (lane_id() == 0) base = atomicAdd(&sel.shared().count, total);
    base = __shfl_sync(kAllLanes, base, 0);
    place = base + inclusive - count;
  }
}

// Offers a tile, whose first chunk of this thread lies at column `id`. Instructions are what this costs,
// so the test, the prefix sum and the stores are written as predicated instructions.
template <class E, int T, class Reload>
__device__ __forceinline__ void offer_tile(Selection sel, const uint4 (&q)[kChunks], U32 id, int k,
                                           U64& limit, Reload reload) {
  constexpr int kPerChunk = Row<E>::kPerChunk, kOwn = kChunks * kPerChunk;
  const float reaches = value_of(key_in(limit)), exceeds = value_of(key_in(limit) + 1);
  const U32 tie = id_in(limit);
  U32 mask = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const float least = id + static_cast<U32>(i * T * kPerChunk) > tie ? exceeds : reaches;
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e)
      asm("{ .reg .pred p; setp.ge.f32 p, %1, %2; @p or.b32 %0, %0, %3; }"
          : "+r"(mask)
          : "f"(__uint_as_float(bits_at<E>(q[i], e))), "f"(least), "r"(1u << (i * kPerChunk + e)));
  }
  const int count = __popc(mask), inclusive = warp_inclusive(count);
  int base = 0;
  const auto counter = static_cast<U32>(__cvta_generic_to_shared(&sel.shared().count));
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %3, 31; @p atom.shared.add.u32 %0, [%1], %2; }"
               : "+r"(base)
               : "r"(counter), "r"(inclusive), "r"(lane_id())
               : "memory");
  base = __shfl_sync(kAllLanes, base, 31);
  const int place = base + inclusive - count;
  if (!__any_sync(kAllLanes, base + inclusive > sel.capacity)) {
    U32 address = static_cast<U32>(__cvta_generic_to_shared(sel.held())) + place * 8;
#pragma unroll
    for (int j = 0; j < kOwn; ++j)
      asm volatile(
          "{ .reg .pred p; .reg .b32 t; and.b32 t, %1, %4; setp.ne.b32 p, t, 0;"
          " @p st.shared.v2.b32 [%0], {%2, %3}; @p add.u32 %0, %0, 8; }"
          : "+r"(address)
          : "r"(mask), "r"(bits_at<E>(q[j / kPerChunk], j % kPerChunk)),
            "r"(id + static_cast<U32>(j / kPerChunk * T * kPerChunk + j % kPerChunk)), "r"(1u << j)
          : "memory");
  } else {
    const uint4 copy[kChunks] = {q[0], q[1], q[2], q[3]};
    limit = offer_slowly<E, T>(sel, k, copy, id, limit, base, __shfl_sync(kAllLanes, inclusive, 31),
                               place);
    reload();  // nothing large lives across the call: no spills on the fast path
  }
}

// Offers the chunks [begin, end) of the row: the next tile is in flight while one is worked on.
template <class E, int T>
__device__ __forceinline__ void offer_chunks(Selection sel, const Row<E>& row, int begin, int end,
                                             int k, U64 limit) {
  uint4 q[kChunks];
  load_tile<E, T>(q, row, begin, end);
  const U32 own = threadIdx.x * Row<E>::kPerChunk;
#pragma unroll 1
  for (int c = begin; c < end; c += 2 * kChunks * T) {
    uint4 p[kChunks];
    auto load_p = [&] { load_tile<E, T>(p, row, c + kChunks * T, end); };
    auto load_q = [&] { load_tile<E, T>(q, row, c + 2 * kChunks * T, end); };
    load_p();
    offer_tile<E, T>(sel, q, row.column(c) + own, k, limit, load_p);
    if (c + kChunks * T >= end) break;
    load_q();
    offer_tile<E, T>(sel, p, row.column(c + kChunks * T) + own, k, limit, load_q);
  }
}

}  // namespace winnow::cuda
