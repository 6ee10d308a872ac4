// select_topk for any k and any strides: a block of 1024 threads for each row, in four or fewer passes.
//
// Three passes find the key of the k-th best score, 11 bits each from the top, and end early where a bin
// ends at the k-th; the last one writes members as it meets them, so ids ascend. Of the scores that
// equal the k-th, the first ones are members. Keys are those of rank.h; 0 is no candidate.
// Nothing is stored between the passes: the bound is reading the row four times by one block.
#pragma once

#include "cuda/select_call.h"

namespace winnow::cuda {

constexpr int kAnyThreads = 1024;

template <class E>
__global__ void __launch_bounds__(kAnyThreads) select_any_kernel(SelectCall<E> call) {
  constexpr int T = kAnyThreads;
  const Selection sel{0};
  const SelectShared& s = sel.shared();
  const std::int64_t i = call.rows - 1 - blockIdx.x;
  const Visible visible = call.visible(i);
  const TopkRow out = call.output.row(i, visible.start);
  const E* scores = call.scores + i * call.row_stride;
  const U32 columns = visible.columns;
  const U32 lane = lane_id(), lowest = key_in(call.lowest);
  auto score = [&](U32 column) { return to_float(scores[column * call.column_stride]); };
  auto key_at = [&](U32 column) -> U32 {
    if (column >= columns) return 0;
    const float x = score(column);
    if (x != x) return 0;
    if (column < call.keep_first || columns - column <= call.keep_last) return kKeptKey;
    const U32 key = key_of(__float_as_uint(x));
    return key >= lowest ? key : 0;
  };

  begin_selection<T>(sel);
  U32 cut = 0;        // the bits that are known of the k-th key
  int need = call.k;  // members among the keys that begin with them
  for (int known = 0; known < 32;) {
    const int digit = min(11, 32 - known), shift = 32 - known - digit;
    for (U32 c0 = static_cast<U32>(warp_id()) * 32; c0 < columns; c0 += T) {
      const U32 key = key_at(c0 + lane);
      const bool on = key != 0 && (known == 0 || (key ^ cut) >> (32 - known) == 0);
      count_bin(sel.histogram(), on, static_cast<int>(key >> shift & ((1u << digit) - 1)));
    }
    __syncthreads();
    find_bin<T>(sel, need);
    if (s.bin < 0) {  // in the first pass only: no more than k candidates
      need = 0;
      break;
    }
    need -= s.above;
    cut |= static_cast<U32>(s.bin) << shift;
    known += digit;
    if (s.in_bin == need) {  // whatever reaches the cut is in
      if (cut != 0) --cut;
      need = 0;
      break;
    }
  }

  int above = 0, equal = 0;  // the keys so far
  __syncthreads();
  for (U32 c0 = 0, set = 0; c0 < columns; c0 += T, set ^= 1) {
    const U32 column = c0 + threadIdx.x, key = key_at(column);
    const bool is_above = key > cut, is_equal = key == cut && key != 0;
    const int own = (is_above ? 1 : 0) | (is_equal ? 1 << 16 : 0), inclusive = warp_inclusive(own);
    int* sums = sel.shared().warp_sum[set];
    if (lane == 31) sums[warp_id()] = inclusive;
    __syncthreads();
    const int before = sum_before<T>(sums) + inclusive - own, all = sum_of_all<T>(sums);
    const int equal_before = equal + (before >> 16);
    if (is_above || (is_equal && equal_before < need))
      out.put(above + (before & 0xffff) + min(equal_before, need), column, score(column));
    above += all & 0xffff;
    equal += all >> 16;
  }
  out.end(above + min(equal, need));
}

}  // namespace winnow::cuda
