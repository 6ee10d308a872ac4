#include "winnow/scale_tiles.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/check.h"

namespace winnow {

static_assert(std::endian::native == std::endian::little);

std::vector<std::int32_t> padded_cu_seqlens(std::span<const std::int32_t> cu_seqlens,
                                            std::int64_t heads) {
  constexpr char kName[] = "padded_cu_seqlens";
  WINNOW_CHECK(kName, heads >= 1, "heads must be at least 1, got {}", heads);
  WINNOW_CHECK(kName, !cu_seqlens.empty() && cu_seqlens.front() == 0,
               "cu_seqlens must start at 0, got {}",
               cu_seqlens.empty() ? std::string("nothing") : std::to_string(cu_seqlens.front()));
  const std::int64_t multiple = scale_token_multiple(heads);
  std::vector<std::int32_t> padded = {0};
  std::int64_t end = 0;
  for (std::size_t g = 1; g < cu_seqlens.size(); ++g) {
    const std::int64_t length = std::int64_t{cu_seqlens[g]} - cu_seqlens[g - 1];
    WINNOW_CHECK(kName, length >= 0, "cu_seqlens must not fall, got {} after {}", cu_seqlens[g],
                 cu_seqlens[g - 1]);
    end += (length + multiple - 1) / multiple * multiple;
    WINNOW_CHECK(kName, end <= std::numeric_limits<std::int32_t>::max(),
                 "padded tokens must be below 2^31, got {}", end);
    padded.push_back(static_cast<std::int32_t>(end));
  }
  return padded;
}

std::int64_t scale_token_capacity(std::int64_t tokens, std::int64_t sequences, std::int64_t heads) {
  constexpr char kName[] = "scale_token_capacity";
  WINNOW_CHECK(kName, tokens >= 0 && sequences >= 0 && heads >= 1,
               "tokens and sequences must not be negative and heads at least 1, got {}, {} and {}",
               tokens, sequences, heads);
  const std::int64_t multiple = scale_token_multiple(heads);
  return (tokens + std::min(tokens, sequences) * (multiple - 1)) / multiple * multiple;
}

Tensor packed_ue8m0(const Tensor& scale) {
  constexpr char kName[] = "packed_ue8m0";
  check_dtype(kName, "scale", scale, {DType::kE8M0});
  check_unit_stride(kName, "scale", scale);
  Tensor words = scale;
  words.dtype = DType::kI32;
  const int last = scale.rank - 1;
  WINNOW_CHECK(kName, scale.shape[last] % 4 == 0, "groups must be a multiple of 4, got {}",
               scale.shape[last]);
  words.shape[last] /= 4;
  for (int axis = 0; axis < last; ++axis) {
    WINNOW_CHECK(kName, scale.strides[axis] % 4 == 0 || scale.shape[axis] <= 1,
                 "strides of scale must be multiples of 4 bytes, got {} on axis {}",
                 scale.strides[axis], axis);
    words.strides[axis] /= 4;
  }
  return words;
}

}  // namespace winnow
