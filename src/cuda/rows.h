// What kernels know of rows and keys: the visible range of a row, and where a key lies. Plain
// values, copied into the launch; offsets are 64 bit.
#pragma once

#include <cstdint>

#include "winnow/key_view.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

// One element per row of an int32 tensor; a left-out tensor reads nothing.
struct IntRows {
  const std::int32_t* data = nullptr;
  std::int64_t stride = 0;

  IntRows() = default;
  explicit IntRows(const Tensor& t) : data(t.as<std::int32_t>()), stride(t.strides[0]) {}
  __device__ std::int32_t operator[](std::int64_t row) const { return data[row * stride]; }
};

struct Range {
  std::int64_t start, end;
  __device__ std::int64_t length() const { return end - start; }
  __device__ bool contains(std::int64_t id) const { return id >= start && id < end; }
};

// The visible keys of a row, clamped to the key space; an empty row is [0, 0).
struct RowRanges {
  IntRows starts, ends;
  std::int64_t keys = 0;

  RowRanges() = default;
  RowRanges(const Tensor& starts_of, const Tensor& ends_of, std::int64_t key_count)
      : starts(starts_of), ends(ends_of), keys(key_count) {}
  __device__ Range operator[](std::int64_t row) const {
    std::int64_t start = starts[row], end = ends[row];
    if (start < 0) start = 0;
    if (end > keys) end = keys;
    if (end <= start) return {0, 0};
    return {start, end};
  }
};

// Where the keys of a view lie, in elements from the start of the data; -1 for a key that is
// missing. The same for every tensor that lies in the pages of the view, with strides of its own.
struct KeyPlaces {
  const std::int32_t* table = nullptr;  // null: keys in one piece
  std::int64_t table_row = 0, table_column = 0, requests = 0, pages = 0;
  IntRows row_request;
  std::int32_t page_size = 1;
  std::int64_t page_stride = 0, key_stride = 0;

  KeyPlaces() = default;
  // `data` lies where the keys of `view` lie: the keys themselves, their values, their scales.
  KeyPlaces(const KeyView& view, const Tensor& data) {
    if (!view.paged()) {
      key_stride = data.strides[0];
      return;
    }
    table = view.block_table.as<std::int32_t>();
    table_row = view.block_table.strides[0];
    table_column = view.block_table.strides[1];
    requests = view.block_table.shape[0];
    pages = view.data.shape[0];
    row_request = IntRows(view.row_request);
    page_size = static_cast<std::int32_t>(view.page_size());
    page_stride = data.strides[0];
    key_stride = data.strides[1];
  }

  __device__ std::int64_t offset(std::int64_t row, std::int64_t key) const {
    if (table == nullptr) return key * key_stride;
    const std::int64_t request = row_request[row];
    if (request < 0 || request >= requests) return -1;
    // Keys of a call fit 31 bits.
    const auto position = static_cast<std::uint32_t>(key);
    const std::uint32_t column = position / static_cast<std::uint32_t>(page_size);
    const std::int64_t page = table[request * table_row + column * table_column];
    if (page < 0 || page >= pages) return -1;
    const std::uint32_t within = position - column * static_cast<std::uint32_t>(page_size);
    return page * page_stride + within * key_stride;
  }
};

}  // namespace winnow::cuda
