// A view of keys: in one piece, or in the pages of a cache.
//
// - One piece: `data` is [keys, ...] and key ids count its first axis. A tensor converts to it.
// - Pages: `data` is [pages, page_size, ...], and ids, like `starts` and `ends`, are positions
//   inside the row's request. Position j of request q lies in page block_table[q, j / page_size],
//   at j % page_size. A row's key space has max_pages * page_size positions.
// - A page id outside [0, pages), or a request outside [0, requests), means that those keys are
//   missing: they are never read, never selected, ignored by attention.
// - Any strides, in 64 bit: a page may hold other things beside its keys.
#pragma once

#include <concepts>

#include "winnow/tensor.h"

namespace winnow {

struct KeyView {
  Tensor data;         // [keys, ...] or [pages, page_size, ...]
  Tensor block_table;  // int32 [requests, max_pages]; left out where the keys are in one piece
  Tensor row_request;  // int32 [rows], the request of each row; left out likewise

  KeyView() = default;
  template <std::convertible_to<const Tensor&> T>
  KeyView(const T& keys) : data(keys) {}  // NOLINT: a tensor is a view of its keys
  KeyView(const Tensor& pages, const Tensor& table, const Tensor& request)
      : data(pages), block_table(table), row_request(request) {}

  bool paged() const { return !block_table.empty(); }
  std::int64_t page_size() const { return paged() ? data.shape[1] : data.shape[0]; }
  // Keys of a row's key space.
  std::int64_t keys() const { return paged() ? block_table.shape[1] * page_size() : page_size(); }
  // The first axis that belongs to a key: heads or channels.
  int key_axis() const { return paged() ? 2 : 1; }
};

}  // namespace winnow
