// What every reference that attends shares: which slots of a row count, dot products of heads, and
// scratch in double.
#pragma once

#include "ref/reader.h"

namespace winnow::ref {

// Calls visit(slot, id) for the slots of row i that count, in list order; without `topk_indices`
// for every key of the range. An id outside the range is not looked at further.
template <class Visit>
void for_each_slot(const Tensor& topk_indices, const Tensor& topk_lengths, const RowRange& range,
                   std::int64_t i, Visit&& visit) {
  if (topk_indices.empty()) {
    for (std::int64_t id = range.start; id < range.end; ++id) visit(id - range.start, id);
    return;
  }
  std::int64_t slots = topk_indices.shape[1];
  if (!topk_lengths.empty()) {
    const std::int64_t length = topk_lengths.as<std::int32_t>()[i * topk_lengths.strides[0]];
    if (length < slots) slots = length;
  }
  for (std::int64_t s = 0; s < slots; ++s) {
    const std::int64_t id = get_id(topk_indices, i, s);
    if (range.contains(id)) visit(s, id);
  }
}

// The most slots a row can have.
inline std::int64_t most_slots(const Tensor& topk_indices, std::int64_t keys) {
  return topk_indices.empty() ? keys : topk_indices.shape[1];
}

// a[i, h, :] . b[j, g, :] over the first `dim` channels.
inline double head_dot(const Tensor& a, std::int64_t i, std::int64_t h, const Tensor& b,
                       std::int64_t j, std::int64_t g, std::int64_t dim) {
  double dot = 0;
  for (std::int64_t d = 0; d < dim; ++d) dot += get(a, i, h, d) * get(b, j, g, d);
  return dot;
}

// Workspace as an array of doubles; it comes without alignment.
inline double* doubles_in(Workspace workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  return reinterpret_cast<double*>((address + 7) / 8 * 8);
}
inline std::int64_t bytes_for_doubles(std::int64_t count) { return count * 8 + 7; }

}  // namespace winnow::ref
