// Where the keys of one row's key space lie in memory.
#pragma once

#include "cpu/simd.h"
#include "winnow/key_view.h"

namespace winnow::cpu::WINNOW_ISA {

// The request of a row, whatever its value; rows of one request see the same keys.
WINNOW_INLINE std::int64_t request_of(const KeyView& view, std::int64_t row) {
  return view.paged() ? view.row_request.as<std::int32_t>()[row * view.row_request.strides[0]] : 0;
}

class KeyLocator {
 public:
  // `data` is the view's own, or a tensor of the same leading axes, such as the scales of its keys.
  WINNOW_INLINE KeyLocator(const KeyView& view, const Tensor& data, std::int64_t row)
      : data_(data.as<char>()) {
    const std::int64_t size = dtype_bytes(data.dtype);
    key_bytes_ = data.strides[view.key_axis() - 1] * size;
    if (!view.paged()) return;
    page_size_ = view.page_size();
    page_bytes_ = data.strides[0] * size;
    const std::int64_t request = request_of(view, row);
    const Tensor& table = view.block_table;
    if (request < 0 || request >= table.shape[0]) return;  // no pages: every key is missing
    pages_ = data.shape[0];
    table_ = table.as<std::int32_t>() + request * table.strides[0];
    table_stride_ = table.strides[1];
  }
  WINNOW_INLINE KeyLocator(const KeyView& view, std::int64_t row)
      : KeyLocator(view, view.data, row) {}

  // Addresses of `count` keys from `first` on, inside the key space; null where one is missing.
  WINNOW_INLINE void locate(std::int64_t first, std::int64_t count, const char** address) const {
    if (page_size_ == 0) {
      for (std::int64_t i = 0; i < count; ++i) address[i] = data_ + (first + i) * key_bytes_;
      return;
    }
    std::int64_t slot = first / page_size_, at = first % page_size_;
    for (std::int64_t i = 0; i < count; ++slot, at = 0) {
      const std::int64_t page = pages_ > 0 ? table_[slot * table_stride_] : -1;
      const char* keys = page >= 0 && page < pages_ ? data_ + page * page_bytes_ : nullptr;
      for (; i < count && at < page_size_; ++i, ++at) {
        address[i] = keys != nullptr ? keys + at * key_bytes_ : nullptr;
      }
    }
  }

 private:
  const char* data_;
  std::int64_t key_bytes_ = 0, page_bytes_ = 0, page_size_ = 0, pages_ = 0;
  const std::int32_t* table_ = nullptr;
  std::int64_t table_stride_ = 0;
};

}  // namespace winnow::cpu::WINNOW_ISA
