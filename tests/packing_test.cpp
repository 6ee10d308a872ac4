// Packs of documents: which share one, and what its boundaries, positions and ranges are.
#include "winnow/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "bench/data.h"
#include "tests/files.h"
#include "winnow/context_parallel.h"

namespace winnow {
namespace {

using Lengths = std::vector<std::int64_t>;
using Packs = std::vector<Lengths>;

TEST(Packing, DocumentsGoIntoTheFullestPackThatHasRoom) {
  EXPECT_EQ(pack_documents(Lengths{5, 3, 4, 1}, {8, 9}), (Packs{{0, 1}, {2, 3}}));
  EXPECT_EQ(pack_documents(Lengths{8, 0, 2, 8}, {8, 9}), (Packs{{0}, {3}, {2}}));  // 0: in none
  EXPECT_EQ(pack_documents(Lengths{5, 3}, {8, 9, 4}), (Packs{{0}, {1}}));          // 5 takes 8 rows
  EXPECT_EQ(pack_documents(Lengths{}, {8, 9}), Packs());
}

// The kind: a fixed number of boundaries, and more documents than that.
TEST(Packing, MoreDocumentsThanTheCapacityBeginTheNextPack) {
  const Packs packs = pack_documents(Lengths{1, 1, 1, 1, 1}, {8, 2});
  EXPECT_EQ(packs, (Packs{{0, 1}, {2, 3}, {4}}));
  for (const Lengths& pack : packs) {
    EXPECT_EQ(lay_out_pack(Lengths(pack.size(), 1), {8, 2}).cu_seqlens.size(), 4u);
  }
  const std::string message = error_of(Status::kInvalidArgument, [] {
    lay_out_pack(Lengths{1, 1, 1}, {8, 2});
  });
  EXPECT_TRUE(has(message, "max_documents = 2 documents, got 3"));
}

TEST(Packing, EveryDocumentIsPackedOnceAndPacksAreFull) {
  bench::Random random(5);
  for (const std::int64_t multiple : {1, 8}) {
    for (const std::int64_t capacity : {3, 100}) {
      Lengths lengths;
      for (int i = 0; i < 400; ++i) lengths.push_back(random.below(65));
      const PackShape shape = {64, capacity, multiple};
      const auto rows = [&](std::int64_t d) {
        return (lengths[static_cast<std::size_t>(d)] + multiple - 1) / multiple * multiple;
      };
      std::vector<int> seen(lengths.size());
      int half_empty = 0;
      for (const Lengths& pack : pack_documents(lengths, shape)) {
        std::int64_t sum = 0;
        Lengths of_pack;
        for (const std::int64_t d : pack) {
          ++seen[static_cast<std::size_t>(d)];
          sum += rows(d);
          of_pack.push_back(lengths[static_cast<std::size_t>(d)]);
        }
        EXPECT_LE(sum, shape.rows);
        EXPECT_LE(std::ssize(pack), capacity);
        half_empty += 2 * sum <= shape.rows && std::ssize(pack) < capacity ? 1 : 0;
        const Pack laid = lay_out_pack(of_pack, shape);
        EXPECT_EQ(std::accumulate(laid.real.begin(), laid.real.end(), std::int64_t{0}),
                  std::accumulate(of_pack.begin(), of_pack.end(), std::int64_t{0}));
      }
      for (std::size_t d = 0; d < lengths.size(); ++d) EXPECT_EQ(seen[d], lengths[d] > 0 ? 1 : 0);
      EXPECT_LE(half_empty, 1);  // two of them would have been one
    }
  }
}

TEST(Packing, BoundariesAreOfAFixedNumberAndTheTailIsTheLastSequence) {
  const Pack pack = lay_out_pack(Lengths{3, 0, 2}, {8, 4});
  EXPECT_EQ(pack.cu_seqlens, (Lengths{0, 3, 3, 5, 5, 8}));
  EXPECT_EQ(pack.positions, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 0, 1, 2}));
  EXPECT_EQ(pack.real, (std::vector<std::uint8_t>{1, 1, 1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(pack.ranges.starts, (std::vector<std::int32_t>{0, 0, 0, 3, 3, 0, 0, 0}));
  EXPECT_EQ(pack.ranges.ends, (std::vector<std::int32_t>{1, 2, 3, 4, 5, 0, 0, 0}));
  // A pack that is full has an empty tail, and one of nothing is a tail.
  EXPECT_EQ(lay_out_pack(Lengths{8}, {8, 2}).cu_seqlens, (Lengths{0, 8, 8, 8}));
  EXPECT_EQ(lay_out_pack(Lengths{}, {8, 2}).cu_seqlens, (Lengths{0, 0, 0, 8}));
  EXPECT_EQ(lay_out_pack(Lengths{}, {0, 1}).cu_seqlens, (Lengths{0, 0, 0}));
}

TEST(Packing, PaddingInsideADocumentsRowsIsEmpty) {
  const Pack pack = lay_out_pack(Lengths{3, 4, 1}, {16, 3, 4});
  EXPECT_EQ(pack.cu_seqlens, (Lengths{0, 4, 8, 12, 16}));
  const std::vector<std::uint8_t> real = {1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(pack.real, real);
  for (std::size_t row = 0; row < real.size(); ++row) {
    EXPECT_EQ(pack.ranges.ends[row] > pack.ranges.starts[row], real[row] == 1) << row;
    EXPECT_EQ(pack.positions[row], static_cast<std::int32_t>(row % 4));
  }
}

// D10: rows beyond the real ones are there on every path.
TEST(Packing, D10RowsOfABucketBeyondTheRealOnesAreEmpty) {
  const Pack pack = lay_out_pack(Lengths{300, 42}, {352, 2});
  const RowRanges ranges = packed_ranges(std::vector<std::int32_t>{0, 300, 342}, 352);
  EXPECT_EQ(pack.ranges.starts, ranges.starts);
  EXPECT_EQ(pack.ranges.ends, ranges.ends);
  EXPECT_EQ(pack.positions.size(), 352u);
  for (std::size_t row = 342; row < 352; ++row) EXPECT_EQ(pack.ranges.ends[row], 0);
}

// D13: an empty sequence between full ones.
TEST(Packing, D13AnEmptySequenceBetweenFullOnesMovesNothing) {
  const Pack pack = lay_out_pack(Lengths{128, 0, 128}, {256, 3});
  const Pack without = lay_out_pack(Lengths{128, 128}, {256, 3});
  EXPECT_EQ(pack.cu_seqlens, (Lengths{0, 128, 128, 256, 256}));
  EXPECT_EQ(pack.ranges.starts[128], 128);
  EXPECT_EQ(pack.ranges.ends[255], 256);
  EXPECT_EQ(pack.ranges.starts, without.ranges.starts);
  EXPECT_EQ(pack.ranges.ends, without.ranges.ends);
  EXPECT_EQ(pack.positions, without.positions);
}

// D7: documents [5, 7] in a pack of 32 rows over 4 ranks. Padded to multiples of 8 they can be cut,
// tail included, and every row is of one rank; as they are they are refused.
TEST(Packing, D7PaddedPacksAreCutForContextParallelism) {
  constexpr std::int64_t kRanks = 4, kRows = 32;
  const Pack pack = lay_out_pack(Lengths{5, 7}, {kRows, 3, 2 * kRanks});
  EXPECT_EQ(pack.cu_seqlens, (Lengths{0, 8, 16, 16, 32}));
  std::vector<int> owners(kRows);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    for (const std::int64_t row :
         context_parallel_positions(pack.cu_seqlens, kRanks, rank, kRows / kRanks)) {
      ++owners[static_cast<std::size_t>(row)];
    }
  }
  EXPECT_EQ(owners, std::vector<int>(kRows, 1));
  const Pack unpadded = lay_out_pack(Lengths{5, 7}, {kRows, 3});
  error_of(Status::kInvalidArgument,
           [&] { context_parallel_positions(unpadded.cu_seqlens, kRanks, 0, kRows / kRanks); });
}

TEST(Packing, WhatDoesNotFitIsSaidWithItsValue) {
  const auto message = [](const Lengths& lengths, const PackShape& shape) {
    const std::string of_all =
        error_of(Status::kInvalidArgument, [&] { pack_documents(lengths, shape); });
    EXPECT_EQ(error_of(Status::kInvalidArgument, [&] { lay_out_pack(lengths, shape); }), of_all);
    return of_all;
  };
  EXPECT_TRUE(has(message({9}, {8, 1}), "from 0 to rows = 8 rows, got 9 of document 0: cut it"));
  EXPECT_TRUE(has(message({1, -1}, {8, 2}), "got -1 of document 1"));
  EXPECT_TRUE(has(message({1}, {-1, 1}), "rows must be from 0 to 2^31 - 1, got -1"));
  EXPECT_TRUE(has(message({1}, {8, 0}), "max_documents must be from 1 to 2^31 - 1, got 0"));
  EXPECT_TRUE(has(message({1}, {8, 1, 0}), "length_multiple must be at least 1, got 0"));
  EXPECT_TRUE(
      has(message({1}, {9, 1, 4}), "rows must be a multiple of length_multiple = 4, got 9"));
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument,
                           [] {
                             lay_out_pack(Lengths{5, 4}, {8, 2});
                           }),
                  "document 1 would end at 9"));
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument,
                           [] {
                             lay_out_pack(Lengths{5, 1, 1}, {16, 3, 8});
                           }),
                  "document 2 would end at 24"));
}

}  // namespace
}  // namespace winnow
