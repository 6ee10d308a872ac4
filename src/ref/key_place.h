// Where key j of a row's key space stands, by the words of include/winnow/key_view.h.
#pragma once

#include "winnow/key_view.h"

namespace winnow::ref {

// Key `index` of `keys` [keys, ...]; index -1: the key is missing.
struct KeyPlace {
  Tensor keys;
  std::int64_t index = -1;
  bool missing() const { return index < 0; }
};

// `data`: the view's own, or a tensor of the same leading axes.
inline KeyPlace place_of(const KeyView& view, const Tensor& data, std::int64_t row,
                         std::int64_t j) {
  if (!view.paged()) return {data, j};
  auto number = [](const Tensor& t, std::int64_t offset) {
    return std::int64_t{t.as<std::int32_t>()[offset]};
  };
  const Tensor& table = view.block_table;
  const std::int64_t request = number(view.row_request, row * view.row_request.strides[0]);
  if (request < 0 || request >= table.shape[0]) return {};
  const std::int64_t page =
      number(table, request * table.strides[0] + j / view.page_size() * table.strides[1]);
  if (page < 0 || page >= data.shape[0]) return {};
  Tensor keys = data;  // the page alone
  keys.data = data.as<char>() + page * data.strides[0] * dtype_bytes(data.dtype);
  keys.rank = data.rank - 1;
  for (int axis = 0; axis < keys.rank; ++axis) {
    keys.shape[axis] = data.shape[axis + 1];
    keys.strides[axis] = data.strides[axis + 1];
  }
  return {keys, j % view.page_size()};
}
inline KeyPlace place_of(const KeyView& view, std::int64_t row, std::int64_t j) {
  return place_of(view, view.data, row, j);
}

}  // namespace winnow::ref
