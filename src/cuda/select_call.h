// A call of select_topk as its kernels see it: plain values, copied into the launch.
#pragma once

#include <algorithm>

#include "cuda/rows.h"
#include "cuda/sample_row.h"
#include "winnow/select_topk.h"

namespace winnow::cuda {

constexpr std::int64_t kMostFastK = 4096;

// What a row sees: its first key, and how many columns.
struct Visible {
  std::int64_t start;
  U32 columns;
};

template <class E>
struct SelectCall {
  const E* scores;
  std::int64_t rows, width, row_stride, column_stride;
  IntRows starts, ends;
  TopkOutput output;
  int k;  // no row has more
  U32 keep_first, keep_last;
  U64 lowest;                   // rank of the lowest candidates
  int capacity = 0, words = 0;  // of the selection's buffer and map

  explicit SelectCall(const SelectTopkArgs& a)
      : scores(a.scores.as<E>()),
        rows(a.scores.shape[0]),
        width(a.scores.shape[1]),
        row_stride(a.scores.strides[0]),
        column_stride(a.scores.strides[1]),
        starts(a.starts),
        ends(a.ends),
        output(a.topk_indices, a.topk_lengths, a.topk_scores),
        k(static_cast<int>(std::max<std::int64_t>(1, std::min(output.topk, width)))),
        keep_first(static_cast<U32>(a.keep_first)),
        keep_last(static_cast<U32>(a.keep_last)),
        lowest(a.keep_minus_inf ? kLowestInfinite : kLowestFinite) {}

  __device__ Visible visible(std::int64_t row) const {
    const std::int64_t start = max(starts[row], 0);
    const std::int64_t end = min(static_cast<std::int64_t>(ends[row]), start + width);
    return {start, end > start ? static_cast<U32>(end - start) : 0};
  }
  // The columns that compete, between those that are kept.
  __device__ Row<E> competing(std::int64_t row, U32 columns) const {
    const U32 first = min(keep_first, columns),
              last = max(first, columns - min(keep_last, columns));
    return {scores + row * row_stride, first, last};
  }
};

// The candidates that a buffer has room for, and the words of the map: as much as lets `blocks` blocks
// share a processor, within the 99 KB that every GPU has.
inline int buffer_capacity(std::int64_t k, int threads) {
  return k > 2048 ? 9216 : threads == 256 ? 5120 : 6144;
}
inline int map_words(std::int64_t width) {
  constexpr std::int64_t kLeast = 1536;  // the histogram takes as much
  return static_cast<int>(
      std::clamp<std::int64_t>((width + 4095) / 4096 * 128, kLeast, kMaxMapWords));
}

// Offers chunks [begin, end) of the row, and the ends of it that the block owns.
template <class E, int T>
__device__ __forceinline__ void offer_row(Selection sel, const SelectCall<E>& call,
                                          const Row<E>& row, U32 columns, int begin, int end,
                                          int ends, U64 limit) {
  if ((ends & kFront) != 0) offer_kept<E, T>(sel, row, call.k, 0, row.first);
  if ((ends & kBack) != 0) offer_kept<E, T>(sel, row, call.k, row.last, columns);
  offer_ragged<E, T>(sel, row, ends, call.k, limit);
  offer_chunks<E, T>(sel, row, begin, end, call.k, limit);
  while (make_room<T>(sel, call.k)) {
  }
}

// The first tiles come to the L2 while the sample is taken.
template <class E>
__device__ __forceinline__ void prefetch_row(const Row<E>& row, int begin, int end) {
  const int c = begin + static_cast<int>(threadIdx.x) * 8;
  if (c < end)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const uint4*>(row.chunks) + c));
}

}  // namespace winnow::cuda
