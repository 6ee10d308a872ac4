// Rules on the values of integer inputs and scales, checked in validation mode
// (winnow/validation.h) alone. With the mode off validate_* reads nothing and allocates nothing.
#pragma once

#include <cstdint>
#include <limits>

#include "winnow/key_view.h"
#include "winnow/tensor.h"
#include "winnow/validation.h"

namespace winnow::ops {

// Whether the values of a tensor are to be checked. Those on a GPU are not: reading them would
// wait.
inline bool validates(const Tensor& t) {
  return validation() && t.device.kind == Device::Kind::kCpu;
}

// Of operations that do not know the key space: ids are int32.
inline constexpr std::int64_t kAnyKey = std::numeric_limits<std::int32_t>::max();

// Rows whose length is negative, or that are not empty and stick out of `keys` keys.
void validate_ranges(const char* operation, const Tensor& starts, const Tensor& ends,
                     std::int64_t keys);

// Of keys in pages, for rows that are not empty: requests outside [0, requests), and pages of the
// row's range outside [0, pages).
void validate_pages(const char* operation, const KeyView& keys, const Tensor& starts,
                    const Tensor& ends);

// Of FP8 and MXFP8, for rows that are not empty and for the keys that they see: scales of queries
// (may be left out) and keys that are NaN, infinite or negative. 0 is the scale of zeros.
void validate_scales(const char* operation, const KeyView& keys, const Tensor& query_scale,
                     const Tensor& key_scale, const Tensor& starts, const Tensor& ends);

// The ranges; topk_lengths (may be left out) outside [0, topk]; in topk_indices (may be left out),
// up to the row's length, ids that are neither -1 nor in the row's range, and ids that stand twice.
void validate_slots(const char* operation, const Tensor& starts, const Tensor& ends,
                    std::int64_t keys, const Tensor& topk_indices, const Tensor& topk_lengths = {});

// Rows without a slot that counts, of which the caller said that there are none.
void validate_nonempty(const char* operation, const Tensor& starts, const Tensor& ends,
                       std::int64_t keys, const Tensor& topk_indices, const Tensor& topk_lengths);

// The first row without a slot that counts (topk_indices and topk_lengths may be left out), or the
// number of rows. For callers that may certify rows_nonempty; it reads the values in any mode.
std::int64_t first_empty_row(const Tensor& starts, const Tensor& ends, std::int64_t keys,
                             const Tensor& topk_indices, const Tensor& topk_lengths);

}  // namespace winnow::ops
