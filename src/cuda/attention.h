// What the kernels of attention share: the slots of a row, tiles of keys that are gathered by id,
// and the online softmax of a head.
#pragma once

#include "cuda/elements.h"
#include "cuda/fragments.h"
#include "cuda/rows.h"

namespace winnow::cuda {

// The slots of one row, in list order or, without a list, keys one after the other.
struct RowSlots {
  Range range;
  const std::int32_t* ids;  // null: no list
  std::int64_t stride, count;
  std::int64_t first;  // without a list: the key of slot 0

  // What stands in a slot below `count`: an id that counts only if the range contains it.
  __device__ std::int64_t raw(std::int64_t slot) const {
    return ids == nullptr ? first + slot : ids[slot * stride];
  }
  // The id of a slot below `count`; -1 if it does not count.
  __device__ std::int64_t operator[](std::int64_t slot) const {
    const std::int64_t id = raw(slot);
    return range.contains(id) ? id : -1;
  }
};

struct SlotLists {
  const std::int32_t* ids = nullptr;
  std::int64_t row_stride = 0, slot_stride = 0, topk = 0;
  IntRows lengths;  // data null: every slot may count
  RowRanges ranges;
  std::int64_t window = -1;  // without a list: the key of every row's slot 0; -1: its range's first

  SlotLists() = default;
  SlotLists(const Tensor& topk_indices, const Tensor& topk_lengths, const Tensor& starts,
            const Tensor& ends, std::int64_t keys)
      : ranges(starts, ends, keys) {
    if (!topk_lengths.empty()) lengths = IntRows(topk_lengths);
    if (topk_indices.empty()) return;
    ids = topk_indices.as<std::int32_t>();
    row_stride = topk_indices.strides[0];
    slot_stride = topk_indices.strides[1];
    topk = topk_indices.shape[1];
  }

  __device__ RowSlots operator[](std::int64_t row) const {
    RowSlots slots{ranges[row], nullptr, slot_stride, 0, 0};
    if (ids == nullptr && window < 0) {
      slots.first = slots.range.start;
      slots.count = slots.range.length();
      return slots;
    }
    if (ids == nullptr) {  // keys [window, window + topk)
      slots.first = window;
      slots.count = min(topk, slots.range.end - window);
      if (slots.count < 0 || slots.range.start >= window + topk) slots.count = 0;
      return slots;
    }
    slots.ids = ids + row * row_stride;
    slots.count = topk;
    if (lengths.data != nullptr && lengths[row] < topk) slots.count = lengths[row];
    if (slots.count < 0 || slots.range.length() == 0) slots.count = 0;
    return slots;
  }
};

// The slots of a row up to the last one that counts, so that the padding of short lists costs
// nothing. All threads of the block call it; contains barriers.
__device__ inline std::int64_t trimmed_count(const RowSlots& slots) {
  if (slots.ids == nullptr || slots.count == 0) return slots.count;
  __shared__ unsigned last;
  if (threadIdx.x == 0) last = 0;
  __syncthreads();
  unsigned own = 0;
  for (std::int64_t s = threadIdx.x; s < slots.count; s += blockDim.x) {
    if (slots[s] >= 0) own = static_cast<unsigned>(s) + 1;
  }
  own = __reduce_max_sync(0xffffffffu, own);
  if (threadIdx.x % 32 == 0) atomicMax(&last, own);
  __syncthreads();
  return last;
}

// 16 bytes of a row, from channel `channel` on: zeros behind its `channels`, and where `from` is
// null. `vectors`: rows begin at multiples of 16 bytes. Numbers of another type are rounded on the
// way.
template <class N, class T>
__device__ void copy_vector(N* to, const T* from, int channel, int channels, bool vectors) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(N));
  const int left = from == nullptr ? 0 : max(0, min(kCount, channels - channel));
  if (left == 0) {
    *reinterpret_cast<uint4*>(to) = uint4{0, 0, 0, 0};
    return;
  }
  if constexpr (std::is_same_v<N, T>) {
    if (vectors) return copy_async(to, from + channel, left * static_cast<int>(sizeof(N)));
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    to[j] = j < left ? from_float<N>(to_float(from[channel + j])) : N{};
  }
}

// Rows of a tile in shared memory, `stride` apart: `channels` numbers from `from[r]`, zeros up to
// `width` (a multiple of 8), all zeros of null. A warp calls it. `somewhere`: any address of the
// same tensor.
template <class T, int kRows>
__device__ void copy_rows(T* to, int stride, const T* const (&from)[kRows], const T* somewhere,
                          int channels, int width, bool vectors) {
  const int lane = threadIdx.x % 32;
  if (!vectors) {
    for (int c = lane; c < width; c += 32) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        to[r * stride + c] = from[r] != nullptr && c < channels ? from[r][c] : T{};
      }
    }
    return;
  }
  for (int c = 8 * lane; c < width; c += 8 * 32) {
    const int bytes = max(0, min(16, 2 * (channels - c)));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool read = from[r] != nullptr && bytes > 0;
      copy_async(to + r * stride + c, read ? from[r] + c : somewhere, read ? bytes : 0);
    }
  }
}

// Whether every row of a tensor begins at a multiple of 16 bytes.
inline bool has_vector_rows(const Tensor& t) {
  bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int axis = 0; axis < t.rank - 1; ++axis) {
    aligned = aligned && t.strides[axis] * dtype_bytes(t.dtype) % 16 == 0;
  }
  return aligned;
}

inline constexpr int kTileKeys = 32;  // slots between two corrections of the softmax

// The softmax of one head, tile by tile; four lanes hold eight slots of a tile each, and all four
// the same state.
struct HeadSoftmax {
  float maximum = -INFINITY, sum = 0;

  // Logits of slots that do not count are -inf. z becomes exp(z - maximum); returns the factor that
  // what was summed before takes.
  __device__ float step(float (&z)[kTileKeys / 4]) {
    float top = z[0];
#pragma unroll
    for (int j = 1; j < kTileKeys / 4; ++j) top = fmaxf(top, z[j]);  // NaN never is the maximum
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    top = fmaxf(top, maximum);
    const float base = top == -INFINITY ? 0 : top;  // exp gives 0 then, and NaN stays
    const float factor = maximum == top ? (top == INFINITY ? NAN : 1) : expf(maximum - base);
    float added = 0;
#pragma unroll
    for (int j = 0; j < kTileKeys / 4; ++j) {
      z[j] = expf(z[j] - base);
      added += z[j];
    }
    added += __shfl_xor_sync(0xffffffffu, added, 1);
    added += __shfl_xor_sync(0xffffffffu, added, 2);
    sum = fmaf(sum, factor, added);
    maximum = top;
    return factor;
  }
  __device__ float inverse() const { return 1 / sum; }
  __device__ float lse() const { return sum == 0 ? -INFINITY : maximum + logf(sum); }
};

// A grid of so many blocks, and the place of a block in it.
inline dim3 grid_of(std::int64_t blocks) {
  constexpr std::int64_t kWide = std::int64_t{1} << 30;
  if (blocks <= kWide) return dim3(static_cast<unsigned>(blocks));
  return dim3(static_cast<unsigned>(kWide), static_cast<unsigned>((blocks + kWide - 1) / kWide));
}
__device__ inline std::int64_t block_index() {
  return blockIdx.x + static_cast<std::int64_t>(gridDim.x) * blockIdx.y;
}

}  // namespace winnow::cuda
