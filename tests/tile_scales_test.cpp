// The tile order of scales, padded prefixes, capacities and packed words, against worked examples.
#include "winnow/tile_scales.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "tests/each.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;

TEST(ScaleTiles, PaddedPrefixes) {
  EXPECT_EQ(scale_token_multiple(64), 2);
  EXPECT_EQ(scale_token_multiple(32), 4);
  EXPECT_EQ(scale_token_multiple(1), 128);
  EXPECT_EQ(scale_token_multiple(3), 128);
  EXPECT_EQ(scale_token_multiple(128), 1);
  EXPECT_EQ(padded_cu_seqlens(Ids{0, 1, 3, 6, 10, 15}, 64), (Ids{0, 2, 4, 8, 12, 18}));
  EXPECT_EQ(padded_cu_seqlens(Ids{0, 0, 5, 5}, 32), (Ids{0, 0, 8, 8}));
  EXPECT_EQ(padded_cu_seqlens(Ids{0}, 1), (Ids{0}));
  EXPECT_EQ(error_of([] {
              padded_cu_seqlens(Ids{0, 4, 3}, 1);
            }),
            "[padded_cu_seqlens] cu_seqlens must not fall, got 3 after 4");
  EXPECT_EQ(error_of([] {
              padded_cu_seqlens(Ids{1, 4}, 1);
            }),
            "[padded_cu_seqlens] cu_seqlens must start at 0, got 1");
}

// The capacity suffices for every split of the tokens into sequences, and some split needs it all.
TEST(ScaleTiles, TheCapacityIsTheLargestNeed) {
  EXPECT_EQ(scale_token_capacity(15, 5, 64), 20);
  for (const std::int64_t heads : {64, 32, 48}) {
    for (std::int32_t tokens = 0; tokens <= 9; ++tokens) {
      std::int32_t most = 0;
      for (std::int32_t a = 0; a <= tokens; ++a) {
        for (std::int32_t b = a; b <= tokens; ++b) {
          most = std::max(most, padded_cu_seqlens(Ids{0, a, b, tokens}, heads).back());
        }
      }
      EXPECT_EQ(scale_token_capacity(tokens, 3, heads), most) << heads << " " << tokens;
    }
  }
}

// Every byte of whole tiles is somebody's, once; the corners as the formula says.
TEST(ScaleTiles, TheOrderIsABijection) {
  for (const std::int64_t groups : {4, 8}) {
    std::set<std::int64_t> bytes;
    for (std::int64_t row = 0; row < 256; ++row)
      for (std::int64_t g = 0; g < groups; ++g) bytes.insert(scale_tile_byte(row, g, groups));
    EXPECT_EQ(static_cast<std::int64_t>(bytes.size()), 256 * groups);
    EXPECT_EQ(*bytes.begin(), 0);
    EXPECT_EQ(*bytes.rbegin(), 256 * groups - 1);
  }
  EXPECT_EQ(scale_tile_byte(0, 1, 4), 1);
  EXPECT_EQ(scale_tile_byte(1, 0, 4), 16);
  EXPECT_EQ(scale_tile_byte(32, 0, 4), 4);
  EXPECT_EQ(scale_tile_byte(127, 3, 4), 511);
  EXPECT_EQ(scale_tile_byte(128, 0, 4), 512);
  EXPECT_EQ(scale_tile_byte(0, 4, 5), 512);  // the fifth group begins a tile of its own
  EXPECT_EQ(scale_tile_byte(128, 0, 5), 1024);
}

TEST(TileScales, ThereAndBack) {
  constexpr std::int64_t kTokens = 15, kHeads = 64, kGroups = 3;
  const Array scale(DType::kE8M0, {kTokens, kHeads, kGroups}),
      back(DType::kE8M0, {kTokens, kHeads, kGroups});
  for (std::int64_t i = 0; i < scale.elements(); ++i)
    scale.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(1 + i % 250);
  const Array cu = ints({6}, {0, 1, 3, 6, 10, 15}), padded = ints({6}, {0, 2, 4, 8, 12, 18});
  const Array tiles(DType::kE8M0, {20 * kHeads / 128, 1, 512});
  const TileScalesArgs forth = {scale, cu, padded, tiles, false};
  for_each_implementation(forth, [&](const std::string& name) {
    std::fill_n(tiles.as<std::uint8_t>(), tiles.elements(), std::uint8_t{0xee});
    tile_scales(forth, {});
    // Token 1 is the first of sequence 1: padded token 2, so row 128 with head 0.
    EXPECT_EQ(tiles.as<std::uint8_t>()[512], scale.as<std::uint8_t>()[kHeads * kGroups]);
    std::int64_t padding = 0;
    for (std::int64_t i = 0; i < tiles.elements(); ++i) padding += tiles.as<std::uint8_t>()[i] == 0;
    EXPECT_EQ(padding, tiles.elements() - scale.elements());
    const TileScalesArgs home = {back, cu, padded, tiles, true};
    pin_implementation("tile_scales", name);
    tile_scales(home, {});
    for (std::int64_t i = 0; i < scale.elements(); ++i)
      ASSERT_EQ(back.as<std::uint8_t>()[i], scale.as<std::uint8_t>()[i]) << i;
  });
}

// Group 0 is the lowest byte of the word.
TEST(ScaleTiles, PackedWords) {
  const Array scale(DType::kE8M0, {2, 8});
  for (int i = 0; i < 16; ++i) scale.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i + 1);
  const Tensor words = packed_ue8m0(scale);
  EXPECT_EQ(words.shape[1], 2);
  EXPECT_EQ(words.as<std::int32_t>()[0], 0x04030201);
  EXPECT_EQ(words.as<std::int32_t>()[words.strides[0] + 1], 0x100f0e0d);
  const Array odd(DType::kE8M0, {2, 6});
  EXPECT_EQ(error_of([&] { packed_ue8m0(odd); }),
            "[packed_ue8m0] groups must be a multiple of 4, got 6");
  EXPECT_EQ(error_of([&] { packed_ue8m0(odd.view().channels(0, 4)); }),
            "[packed_ue8m0] strides of scale must be multiples of 4 bytes, got 6 on axis 0");
}

}  // namespace
}  // namespace winnow::testing
