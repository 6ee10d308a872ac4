// The slots of a row's list that count, side by side, and the rows of their keys.
#pragma once

#include "base/row_range.h"
#include "cpu/tile.h"
#include "winnow/key_view.h"

namespace winnow::cpu::WINNOW_ISA {

// The slots of a row: a list of keys, or all keys from `first` on.
struct Slots {
  const std::int32_t* ids = nullptr;  // null: the keys first, first + 1, ...
  std::int64_t first = 0, count = 0;
  std::int64_t key(std::int64_t s) const { return ids != nullptr ? ids[s] : first + s; }
};

// The rows of a key tensor [keys, channels], or those of one head of [keys, heads, channels]; in
// pages [pages, page_size, heads, channels] key `page * page_size + place` (place_slots).
template <class T>
struct KeyRows {
  const T* data;
  std::int64_t stride, page_stride = 0;
  std::uint32_t page_size = 0;  // 0: in one piece
  explicit KeyRows(const Tensor& t) : data(t.as<T>()), stride(t.strides[0]) {}
  KeyRows(const Tensor& t, std::int64_t head)
      : data(t.as<T>() + head * t.strides[1]), stride(t.strides[0]) {}
  KeyRows(const KeyView& view, const Tensor& t, std::int64_t head) : KeyRows(t, head) {
    if (!view.paged()) return;
    data = t.as<T>() + head * t.strides[2];
    stride = t.strides[1];
    page_stride = t.strides[0];
    page_size = static_cast<std::uint32_t>(view.page_size());
  }
  const T* operator[](std::int64_t key) const {
    if (page_size == 0) return data + key * stride;
    const auto k = static_cast<std::uint32_t>(key);
    return data + k / page_size * page_stride + k % page_size * stride;
  }
};

// How many slots of row i's list may count: all of them without topk_lengths. May be negative.
inline std::int64_t list_length(const Tensor& topk_indices, const Tensor& topk_lengths,
                                std::int64_t i) {
  const std::int64_t slots = topk_indices.shape[1];
  if (topk_lengths.empty()) return slots;
  return min64(slots, topk_lengths.as<std::int32_t>()[i * topk_lengths.strides[0]]);
}

// Slots [first, last) of row i whose id lies in the range: their ids and, unless `slot` is null,
// their places, in list order. Returns how many. Nothing is written past last - first.
inline std::int64_t keep_slots(const Tensor& topk_indices, std::int64_t i, std::int64_t first,
                               std::int64_t last, RowRange range, std::int32_t* slot,
                               std::int32_t* id) {
  const std::int64_t stride = topk_indices.strides[1];
  const std::int32_t* list = topk_indices.as<std::int32_t>() + i * topk_indices.strides[0];
  std::int64_t count = 0;
  for (std::int64_t s = first; s < last; ++s) {
    const std::int32_t key = list[s * stride];
    if (slot != nullptr) slot[count] = static_cast<std::int32_t>(s);
    id[count] = key;
    count += range.contains(key) ? 1 : 0;
  }
  return count;
}

// Turns positions in a row's request into keys of the pages, `page * page_size + place`, in place;
// those that are missing are dropped. Returns how many remain. The pages hold fewer than 2^31 keys.
inline std::int64_t place_slots(const KeyView& view, std::int64_t row, std::int64_t count,
                                std::int32_t* id) {
  const Tensor &request = view.row_request, &table = view.block_table;
  const std::int64_t q = request.as<std::int32_t>()[row * request.strides[0]];
  if (q < 0 || q >= table.shape[0]) return 0;
  const std::int32_t* pages = table.as<std::int32_t>() + q * table.strides[0];
  const auto size = static_cast<std::int32_t>(view.page_size());
  std::int64_t kept = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    const std::int64_t page = pages[id[s] / size * table.strides[1]];
    if (page < 0 || page >= view.data.shape[0]) continue;
    id[kept++] = static_cast<std::int32_t>(page * size + id[s] % size);
  }
  return kept;
}

// The rows of slots [s, s + 16); past the last slot its row is repeated.
template <class T>
WINNOW_INLINE void slot_rows(const KeyRows<T>& keys, const Slots& slots, std::int64_t s,
                             const T* (&row)[kPanel]) {
  for (int n = 0; n < kPanel; ++n) row[n] = keys[slots.key(min64(s + n, slots.count - 1))];
}

}  // namespace winnow::cpu::WINNOW_ISA
