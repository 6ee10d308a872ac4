// Where scales of MXFP8 lie for kernels that want them in tiles or packed in words.
//
// Tiles: a tile is 128 rows x 4 groups, 512 bytes; the groups of a row are padded to a multiple of
// 4.
//   row m, group g -> byte tile * 512 + m % 32 * 16 + m % 128 / 32 * 4 + g % 4,
//   tile = m / 128 * ceil(groups / 4) + g / 4
// A row is a head of a token: m = token * heads + head. In packed sequences the tokens of each
// sequence are padded so that it ends with a tile: to a multiple of 128 / gcd(128, heads).
// Bytes of padding are 0.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "winnow/tensor.h"

namespace winnow {

inline constexpr std::int64_t kScaleTileRows = 128, kScaleTileGroups = 4, kScaleTileBytes = 512;

inline std::int64_t scale_tile_byte(std::int64_t row, std::int64_t group, std::int64_t groups) {
  const std::int64_t tile = row / kScaleTileRows * ((groups + 3) / 4) + group / 4;
  return tile * kScaleTileBytes + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

// Tokens of a sequence are padded to a multiple of this: 128 / gcd(128, heads).
inline std::int64_t scale_token_multiple(std::int64_t heads) {
  return kScaleTileRows / std::gcd(kScaleTileRows, heads);
}

// Boundaries of the padded sequences; cu_seqlens must start at 0 and not fall. 64 heads, lengths
// 1, 2, 3, 4, 5: 0, 2, 4, 8, 12, 18.
std::vector<std::int32_t> padded_cu_seqlens(std::span<const std::int32_t> cu_seqlens,
                                            std::int64_t heads);

// Padded tokens that always suffice for `tokens` tokens in `sequences` sequences, known before
// their lengths are: floor((tokens + min(tokens, sequences) * (a - 1)) / a) * a, a = the multiple.
std::int64_t scale_token_capacity(std::int64_t tokens, std::int64_t sequences, std::int64_t heads);

// Packed UE8M0: the bytes of 4 groups as one int32, group 0 lowest. In the memory of a
// little-endian machine this is the same data: e8m0 [.., groups] seen as int32 [.., groups / 4].
// groups must be a multiple of 4, and the groups of a row contiguous.
Tensor packed_ue8m0(const Tensor& scale);

}  // namespace winnow
