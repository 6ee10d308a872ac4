// Row ranges and row blocks: which keys a row sees, however sequences are laid out.
#include "winnow/layout.h"

#include <gtest/gtest.h>

#include "base/row_range.h"
#include "bench/data.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using Ids = std::vector<std::int32_t>;

TEST(Layout, CausalSeesItselfAndWhatCameBefore) {
  const RowRanges r = causal_ranges(4);
  EXPECT_EQ(r.starts, (Ids{0, 0, 0, 0}));
  EXPECT_EQ(r.ends, (Ids{1, 2, 3, 4}));
  EXPECT_EQ(causal_ranges(0).rows(), 0);
}

// F2: rows after a context are bottom-right: 2 rows after 3 keys see 4 and 5.
TEST(Layout, CausalDiagonalIsBottomRight) {
  EXPECT_EQ(causal_ranges(2, 3).ends, (Ids{4, 5}));
  EXPECT_THROW(causal_ranges(5, -3), Error);
}

// F2: what rows see when they are not as many as the keys, by the name of the alignment.
TEST(Layout, F2TheAlignmentIsNamed) {
  const auto seen = [](std::int64_t rows, std::int64_t keys, CausalAlignment alignment) {
    const RowRanges r = causal_ranges(rows, keys, alignment);
    EXPECT_EQ(r.starts, Ids(static_cast<std::size_t>(rows), 0));
    return r.ends;
  };
  constexpr CausalAlignment kBottom = CausalAlignment::kBottomRight,
                            kTop = CausalAlignment::kTopLeft;
  EXPECT_EQ(seen(2, 5, kBottom), (Ids{4, 5}));
  EXPECT_EQ(seen(5, 2, kBottom), (Ids{0, 0, 0, 1, 2}));
  EXPECT_EQ(seen(2, 5, kTop), (Ids{1, 2}));
  EXPECT_EQ(seen(5, 2, kTop), (Ids{1, 2, 2, 2, 2}));
  for (const CausalAlignment alignment : {kBottom, kTop}) {
    EXPECT_EQ(seen(4, 4, alignment), (Ids{1, 2, 3, 4}));
    EXPECT_EQ(seen(3, 0, alignment), (Ids{0, 0, 0}));
    EXPECT_EQ(seen(0, 3, alignment), Ids{});
    EXPECT_THROW(causal_ranges(-1, 4, alignment), Error);
    EXPECT_THROW(causal_ranges(4, -1, alignment), Error);
    EXPECT_THROW(causal_ranges(1, std::int64_t{1} << 31, alignment), Error);
  }
}

// More queries than keys, as ranges of any origin may say it: rows without a key are empty.
TEST(Layout, RowsBeforeTheFirstKeyAreEmpty) {
  bench::Guarded starts(DType::kI32, {5}), ends(DType::kI32, {5});
  bench::Random random(1);
  bench::fill_ranges("causal", 2, 1, starts, ends, random);
  std::vector<std::int64_t> lengths;
  for (int i = 0; i < 5; ++i) lengths.push_back(row_range(starts, ends, i, 2).length());
  EXPECT_EQ(lengths, (std::vector<std::int64_t>{0, 0, 0, 1, 2}));
}

TEST(Layout, RangesAreClampedToTheKeySpace) {
  Ids starts{-7, 3, 9, 2, -2000000000}, ends{2, 99, 12, 1, 2000000000};
  const Tensor s = make_tensor(starts.data(), DType::kI32, {5});
  const Tensor e = make_tensor(ends.data(), DType::kI32, {5});
  const std::int64_t expected[][2] = {{0, 2}, {3, 8}, {8, 8}, {2, 2}, {0, 8}};
  for (int i = 0; i < 5; ++i) {
    const RowRange range = row_range(s, e, i, 8);
    EXPECT_EQ(range.length(), expected[i][1] - expected[i][0]) << i;
    if (range.length() > 0) {
      EXPECT_EQ(range.start, expected[i][0]) << i;
    }
  }
}

// Sequences [0, 5) and [5, 9): the first row of the second sees one key, its own.
TEST(Layout, PackedSequencesDoNotSeeEachOther) {
  const Ids cu_seqlens{0, 5, 9};
  const RowRanges r = packed_ranges(cu_seqlens, 9);
  EXPECT_EQ(r.starts[5], 5);
  EXPECT_EQ(r.ends[5], 6);
  for (int row = 0; row < 9; ++row) {
    EXPECT_EQ(r.starts[row], row < 5 ? 0 : 5);
    EXPECT_EQ(r.ends[row], row + 1);
  }
}

// An empty sequence between full ones changes nothing for the others.
TEST(Layout, EmptySequencesKeepTheOthersInStep) {
  const Ids with{0, 128, 128, 256}, without{0, 128, 256}, all_empty{0, 0, 0};
  const RowRanges a = packed_ranges(with, 256), b = packed_ranges(without, 256);
  EXPECT_EQ(a.starts, b.starts);
  EXPECT_EQ(a.ends, b.ends);
  EXPECT_EQ(a.starts[128], 128);
  EXPECT_EQ(a.ends[255], 256);
  EXPECT_EQ(packed_ranges(all_empty, 0).rows(), 0);
}

// Refused before a row of the long sequence is made.
TEST(Layout, FallingSequencesAreRefused) {
  const Ids falling{0, 2147483647, 0};
  EXPECT_THROW(packed_ranges(falling, 0), Error);
  EXPECT_THROW(batched_ranges(std::int64_t{1} << 40, 0), Error);
}

TEST(Layout, PaddingRowsAreEmpty) {
  const Ids cu_seqlens{0, 3};
  const RowRanges r = packed_ranges(cu_seqlens, 5);
  EXPECT_EQ(r.ends, (Ids{1, 2, 3, 0, 0}));
}

TEST(Layout, BatchIsPackedSequencesOfEqualLength) {
  const RowRanges r = batched_ranges(3, 2);
  EXPECT_EQ(r.starts, (Ids{0, 0, 2, 2, 4, 4}));
  EXPECT_EQ(r.ends, (Ids{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(batched_ranges(0, 7).rows(), 0);
  EXPECT_EQ(batched_ranges(7, 0).rows(), 0);
}

TEST(Layout, BadSequencesAreRefusedByValue) {
  const Ids empty{}, late{1, 2}, falling{0, 5, 3};
  EXPECT_THROW(packed_ranges(empty, 0), Error);
  EXPECT_THROW(packed_ranges(late, 2), Error);
  EXPECT_THROW(packed_ranges(falling, 5), Error);
  EXPECT_THROW(packed_ranges(Ids{0, 5}, 4), Error);
  EXPECT_THROW(batched_ranges(1 << 20, 1 << 20), Error);
  EXPECT_THROW(causal_ranges(-1), Error);
  EXPECT_THROW(causal_ranges(1, std::int64_t{1} << 31), Error);
  try {
    packed_ranges(falling, 5);
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[layout] cu_seqlens must not fall, got 3 after 5 at entry 2");
  }
}

// Every row with keys is in one block, blocks do not mix sequences, and they cover their ranges.
void expect_blocks(const RowRanges& r, const std::vector<RowBlock>& blocks, int rows_per_block) {
  std::vector<int> seen(static_cast<std::size_t>(r.rows()));
  for (const RowBlock& b : blocks) {
    EXPECT_LE(b.row_count, rows_per_block);
    std::int32_t end = 0;
    for (std::int32_t row = b.first_row; row < b.first_row + b.row_count; ++row) {
      ++seen[static_cast<std::size_t>(row)];
      EXPECT_EQ(r.starts[row], b.key_begin);
      EXPECT_LT(r.starts[row], r.ends[row]);
      end = std::max(end, r.ends[row]);
    }
    if (b.row_count > 0) {
      EXPECT_EQ(end, b.key_end);
    }
  }
  for (std::int64_t row = 0; row < r.rows(); ++row)
    EXPECT_EQ(seen[row], r.ends[row] > r.starts[row] ? 1 : 0) << row;
}

TEST(Layout, BlocksHoldEveryRowWithKeysOnce) {
  const Ids cu_seqlens{0, 1, 1, 8, 24, 25};
  const RowRanges r = packed_ranges(cu_seqlens, 29);
  for (int rows_per_block : {1, 4, 16, 100})
    expect_blocks(r, row_blocks(r.starts, r.ends, rows_per_block), rows_per_block);
  EXPECT_EQ(row_blocks(r.starts, r.ends, 100).size(), 4u);
}

TEST(Layout, BlocksOfFixedCapacityArePaddedWithEmptyRuns) {
  const RowRanges r = causal_ranges(10);
  const std::vector<RowBlock> blocks = row_blocks(r.starts, r.ends, 4, 7);
  ASSERT_EQ(blocks.size(), 7u);
  for (int b = 0; b < 7; ++b) EXPECT_EQ(blocks[b].row_count, b < 2 ? 4 : b == 2 ? 2 : 0);
  expect_blocks(r, blocks, 4);
  EXPECT_THROW(row_blocks(r.starts, r.ends, 4, 2), Error);
  EXPECT_THROW(row_blocks(r.starts, r.ends, 0), Error);
  EXPECT_THROW(row_blocks(r.starts, Ids{1}, 4), Error);
}

TEST(Layout, TheNonEmptyCertificate) {
  const auto proves = [](const RowRanges& r, std::int64_t keys, std::int64_t pool_size = 1,
                         bool tail = false) {
    return can_prove_all_rows_nonempty(r.starts, r.ends, keys, pool_size, tail);
  };
  EXPECT_TRUE(proves(causal_ranges(9), 9));
  EXPECT_TRUE(proves(causal_ranges(0), 0));  // of no rows everything is true
  EXPECT_TRUE(proves(batched_ranges(3, 4), 12));
  const std::int32_t packed[] = {0, 5, 5, 9};
  EXPECT_TRUE(proves(packed_ranges(packed, 9), 9));
  EXPECT_FALSE(proves(packed_ranges(packed, 10), 9));   // a row of padding
  EXPECT_FALSE(proves({{0, 3}, {4, 3}}, 9));            // an empty row
  EXPECT_FALSE(proves({{0, 9}, {4, 12}}, 9));           // a range behind the keys
  EXPECT_FALSE(proves({{-5}, {0}}, 9));                 // and one before them
  EXPECT_FALSE(proves(causal_ranges(9), 9, 4));         // rows 0 to 2 hold no whole pool
  EXPECT_FALSE(proves(causal_ranges(4, 100), 104, 4));  // never, whatever the ranges
  EXPECT_TRUE(proves(causal_ranges(9), 9, 4, true));    // the tail holds the row itself
  EXPECT_FALSE(proves(packed_ranges(packed, 10), 9, 4, true));
}

}  // namespace
}  // namespace winnow
