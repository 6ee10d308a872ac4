// Pools of sequences, of packed sequences and of masks; what rows see of them; their slots in
// pages.
#include "winnow/pools.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/each.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;

std::vector<std::uint8_t> mask_of(const std::string& rows) {
  std::vector<std::uint8_t> mask;
  for (const char c : rows) {
    if (c == '0' || c == '1') mask.push_back(c == '1');
  }
  return mask;
}

TEST(Pools, OfOneSequence) {
  for (const std::int32_t length : {0, 1, 3, 4, 5, 13}) {
    const PoolLayout pools = pool_layout(packed_spans(Ids{0, length}), 4);
    Ids bases;
    for (std::int32_t base = 0; base + 4 <= length; base += 4) bases.push_back(base);
    EXPECT_EQ(pools.bases, bases);
    EXPECT_EQ(pools.first_pool, (Ids{0, length / 4}));
  }
}

// They begin anew with each sequence, never span two, and empty or short ones have none.
TEST(Pools, RestartInPackedSequences) {
  const PoolLayout pools = pool_layout(packed_spans(Ids{0, 5, 5, 14, 17}), 4);
  EXPECT_EQ(pools.bases, (Ids{0, 5, 9}));
  EXPECT_EQ(pools.first_pool, (Ids{0, 1, 1, 3, 3}));
  EXPECT_EQ(pool_layout(packed_spans(Ids{0}), 4).bases, Ids{});
  EXPECT_EQ(pool_layout(packed_spans(Ids{0, 3}), 1).bases, (Ids{0, 1, 2}));
}

TEST(Pools, BeginAtTheFirstValidToken) {
  const std::vector<std::uint8_t> mask =
      mask_of("1111111111 0001111111 0000011111 1111111000 0011110000 0000000000");
  const TokenSpans spans = valid_spans(mask, 6, 10);
  EXPECT_EQ(spans.begins, (Ids{0, 13, 25, 30, 42, 50}));
  EXPECT_EQ(spans.ends, (Ids{10, 20, 30, 37, 46, 50}));
  const PoolLayout pools = pool_layout(spans, 4);
  EXPECT_EQ(pools.bases, (Ids{0, 4, 13, 25, 30, 42}));
  EXPECT_EQ(pools.first_pool, (Ids{0, 2, 3, 4, 5, 6, 6}));
}

TEST(Pools, AMaskWithAGapIsRefused) {
  EXPECT_EQ(
      error_of([] { valid_spans(mask_of("111111 011011"), 2, 6); }),
      "[pools] sample 1 of the mask must have one valid span, got a gap at token 3 with token "
      "4 valid behind it");
  EXPECT_EQ(error_of([] { masked_rows(mask_of("100 101"), 1, 2, 3); }),
            "[pools] row 1 of sample 0 of the mask must have one valid span, got a gap at token 1 "
            "with token 2 valid behind it");
  EXPECT_EQ(error_of([] { valid_spans(mask_of("111"), 2, 6); }),
            "[pools] the mask must have 2 * 1 * 6 bytes, got 3");
}

// Rows of an explicit mask, and the first key that any of a sample's rows sees.
TEST(Pools, OfAnExplicitMask) {
  const MaskedRows masked = masked_rows(mask_of("0000 0100 0110"
                                                "1000 1100 1110"
                                                "0000 0000 0000"),
                                        3, 3, 4);
  EXPECT_EQ(masked.rows.starts, (Ids{0, 1, 1, 4, 4, 4, 0, 0, 0}));
  EXPECT_EQ(masked.rows.ends, (Ids{0, 2, 3, 5, 6, 7, 0, 0, 0}));
  EXPECT_EQ(masked.spans.begins, (Ids{1, 4, 8}));
  EXPECT_EQ(masked.spans.ends, (Ids{3, 7, 8}));
}

TEST(Pools, RowsOfSpansAreCausal) {
  const RowRanges rows = causal_ranges(valid_spans(mask_of("0110 0000 1110"), 3, 4), 12);
  EXPECT_EQ(rows.starts, (Ids{0, 1, 1, 0, 0, 0, 0, 0, 8, 8, 8, 0}));
  EXPECT_EQ(rows.ends, (Ids{0, 2, 3, 0, 0, 0, 0, 0, 9, 10, 11, 0}));
  const Ids cuts{0, 4, 4, 9};
  const RowRanges packed = packed_ranges(cuts, 11), spans = causal_ranges(packed_spans(cuts), 11);
  EXPECT_EQ(packed.starts, spans.starts);
  EXPECT_EQ(packed.ends, spans.ends);
}

// From the definition: a pool counts if its last token is in the row's range.
TEST(Pools, AreVisibleOnceTheirLastTokenIs) {
  for (const std::int64_t size : {1, 2, 4, 7}) {
    const PoolLayout pools = pool_layout(packed_spans(Ids{0, 9, 9, 11, 40}), size);
    RowRanges rows;
    for (const auto& [begin, end] : std::vector<std::pair<int, int>>{{0, 9}, {9, 11}, {11, 40}}) {
      for (std::int32_t s = begin; s < end; ++s) {
        for (std::int32_t e = s - 1; e <= end; ++e) {
          rows.starts.push_back(s);
          rows.ends.push_back(e);
        }
      }
    }
    const RowRanges seen = pool_ranges(pools, rows);
    for (std::size_t i = 0; i < rows.starts.size(); ++i) {
      Ids visible, got;
      for (std::size_t m = 0; m < pools.bases.size(); ++m) {
        const std::int64_t last = pools.bases[m] + size - 1;
        if (last >= rows.starts[i] && last < rows.ends[i])
          visible.push_back(static_cast<std::int32_t>(m));
      }
      for (std::int32_t m = seen.starts[i]; m < seen.ends[i]; ++m) got.push_back(m);
      EXPECT_EQ(got, visible) << size << " [" << rows.starts[i] << ", " << rows.ends[i] << ")";
    }
  }
}

TEST(Pools, OfRequestsBeginAtPositionZero) {
  const RowRanges rows{{0, 0, 0, 0, 8, 5, -2}, {0, 3, 4, 11, 16, 4, 7}};
  const RowRanges seen = pool_ranges(rows, 4);
  EXPECT_EQ(seen.starts, (Ids{0, 0, 0, 0, 2, 1, 0}));
  EXPECT_EQ(seen.ends, (Ids{0, 0, 1, 2, 4, 1, 1}));
}

TEST(Pools, ARowThatLeavesItsSequenceIsRefused) {
  const PoolLayout pools = pool_layout(packed_spans(Ids{0, 8, 16}), 4);
  EXPECT_EQ(error_of([&] {
              pool_ranges(pools, RowRanges{{0, 6}, {8, 9}});
            }),
            "[pools] row 1 must stay in one sequence, got the tokens [6, 9)");
  EXPECT_NE(error_of([&] { pool_ranges(pools, RowRanges{{16}, {17}}); }), "");
  EXPECT_NE(error_of([&] { pool_ranges(pools, RowRanges{{-1}, {3}}); }), "");
  EXPECT_EQ(error_of([] {
              pool_layout(packed_spans(Ids{0, 8}), 0);
            }),
            "[pools] pool_size must be at least 1, got 0");
  EXPECT_EQ(error_of([] {
              packed_spans(Ids{0, 8, 7});
            }),
            "[pools] cu_seqlens must not fall, got 7 after 8 at entry 2");
  EXPECT_NE(error_of([] { pool_layout(TokenSpans{{0, 3}, {4, 5}}, 2); }), "");
}

// Units of the block table are pages of tokens; a page of 20 tokens holds 5 pools. 100 tokens are
// 25 pools in 25 slots of their own, whatever the pages are.
TEST(Pools, TokenUnitAndPoolUnitShareOneBlockTable) {
  const Ids table{7, 2, 9, 0, 4};
  const Ids slots = pool_slots(table, 20, 4, 0, 100);
  std::set<std::int32_t> distinct;
  for (std::int32_t position = 0; position < 100; ++position) {
    const std::int32_t slot = slots[static_cast<std::size_t>(position)];
    if (position % 4 != 3) {
      EXPECT_EQ(slot, -1);
      continue;
    }
    EXPECT_EQ(slot / 5, table[static_cast<std::size_t>(position / 20)]);
    EXPECT_EQ(slot % 5, position % 20 / 4);
    distinct.insert(slot);
  }
  EXPECT_EQ(distinct.size(), 25u);
  EXPECT_EQ(error_of([] { pools_per_page(20, 8); }),
            "[pools] pool_size must divide page_size, got 8 and 20");
  EXPECT_EQ(pools_per_page(20, 4), 5);
}

// Any cut of the appends gives the slots of one shot, and a column past the table is an error.
TEST(Pools, SlotsDoNotDependOnTheCutAndEndWithTheTable) {
  Ids table;
  for (std::int32_t page = 0; page < 32; ++page) table.push_back(31 - page);
  const Ids whole = pool_slots(table, 128, 4, 0, 4096);
  for (std::int32_t position = 3; position < 4096; position += 4) {
    EXPECT_EQ(whole[static_cast<std::size_t>(position)],
              (31 - position / 128) * 32 + position % 128 / 4);
  }
  for (const std::int64_t step : {1, 3, 127, 1000}) {
    Ids cut;
    for (std::int64_t first = 0; first < 4096; first += step) {
      const Ids part = pool_slots(table, 128, 4, first, std::min<std::int64_t>(step, 4096 - first));
      cut.insert(cut.end(), part.begin(), part.end());
    }
    EXPECT_EQ(cut, whole) << step;
  }
  EXPECT_EQ(error_of([&] { pool_slots(table, 128, 4, 4096, 1); }),
            "[pools] position 4096 must lie in the block table of 32 pages, got page 32");
  EXPECT_NE(error_of([] { pool_slots(Ids{-1}, 128, 4, 0, 1); }), "");
  EXPECT_NE(error_of([] { pool_slots(Ids{1 << 28}, 128, 4, 0, 1); }), "");
}

}  // namespace
}  // namespace winnow::testing
