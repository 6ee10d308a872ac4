// Rotary position embedding. Which channels form a pair differs between models and between the
// attention and the indexer of one model, so the pairing is always said.
#pragma once

#include <cstdint>
#include <span>

#include "base/array.h"

namespace winnow::nn {

enum class RopePairing {
  kInterleaved,  // channels 2i and 2i + 1
  kHalfSplit,    // channels i and i + dim / 2
};

// cos and sin of position * theta^(-2i / dim), [positions, dim / 2], in the dtype of the model.
struct RopeTable {
  Array cosine, sine;
  RopeTable() = default;
  RopeTable(std::int64_t positions, std::int64_t dim, double theta, DType dtype);
};

// Rotates x [rows, heads, dim] in place by each row's position: (a, b) -> (a cos - b sin, b cos + a
// sin). `x` may be a view of some channels of a wider tensor. inverse: by the negative angle, which
// is also the backward. dim 0 does nothing. A position outside the table is an error.
void rope(const Tensor& x, std::span<const std::int32_t> positions, const RopeTable& table,
          RopePairing pairing, bool inverse = false);

}  // namespace winnow::nn
