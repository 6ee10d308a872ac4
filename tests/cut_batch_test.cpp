// Batches cut for ranks of context parallelism: who holds which row, what padding is, and that
// every token is somebody's, once.
#include "model/cut_batch.h"

#include <gtest/gtest.h>

#include "tests/thread_ranks.h"
#include "tests/tiny_models.h"

namespace winnow::model {
namespace {

using testing::error_of;
using testing::run_ranks;
using testing::ThreadCommunicator;
using Ids = std::vector<std::int32_t>;
using Boundaries = std::vector<std::int64_t>;

// The parts of all ranks.
std::vector<Batch> shares(const Batch& batch, std::int64_t ranks, std::int64_t local_rows = 0) {
  std::vector<Batch> all(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](ThreadCommunicator& group) {
    Batch mine = share_batch(batch, group, local_rows);
    mine.context.reset();  // the group ends with this call
    all[static_cast<std::size_t>(group.rank())] = std::move(mine);
  });
  return all;
}

bool sees_nothing(const Batch& batch, std::size_t row) {
  return batch.ranges.ends[row] <= batch.ranges.starts[row];
}

// Rows with keys of all ranks, by what they are: token, target, position in the sequence, number of
// keys seen, and what their depths read.
std::vector<Ids> rows_of_all(const std::vector<Batch>& parts) {
  std::vector<Ids> rows;
  for (const Batch& part : parts) {
    for (std::size_t i = 0; i < part.tokens.size(); ++i) {
      if (sees_nothing(part, i)) continue;
      rows.push_back({part.tokens[i], part.targets[i], part.positions[i],
                      part.ranges.ends[i] - part.ranges.starts[i]});
      for (const Ids& tokens : part.mtp_tokens) rows.back().push_back(tokens[i]);
      for (const Ids& targets : part.mtp_targets) rows.back().push_back(targets[i]);
    }
  }
  std::ranges::sort(rows);
  return rows;
}

void expect_every_row_once(const Batch& batch, const std::vector<Batch>& parts) {
  EXPECT_EQ(rows_of_all(parts), rows_of_all({batch}));
  for (const Batch& part : parts) {
    EXPECT_EQ(part.tokens.size(), parts[0].tokens.size());
    for (std::size_t i = 0; i < part.tokens.size(); ++i) {
      if (!sees_nothing(part, i)) continue;
      EXPECT_EQ(part.targets[i], -1);
      for (const Ids& targets : part.mtp_targets) EXPECT_EQ(targets[i], -1);
    }
  }
}

// F4, F16: S = 16 on two ranks. Rank 0 holds the positions 0 to 3 and 12 to 15, and its row 4 sees
// 13 keys: what a row sees comes from where it stands, not from its number on the rank.
TEST(CutBatch, F4F16RowsSeeWhatTheirPositionSays) {
  const std::vector<Batch> parts = shares(packed_batch({16}, 11, 1), 2);
  EXPECT_EQ(parts[0].positions, (Ids{0, 1, 2, 3, 12, 13, 14, 15}));
  EXPECT_EQ(parts[1].positions, (Ids{4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(parts[0].ranges.ends, (Ids{1, 2, 3, 4, 13, 14, 15, 16}));
  EXPECT_EQ(parts[1].ranges.ends, (Ids{5, 6, 7, 8, 9, 10, 11, 12}));
}

// D7: documents of 5 and 7 rows in 16 on four ranks. The end of each is padding on the ranks that
// hold it; in buffers with more room every rank has rows that belong to no document at all.
TEST(CutBatch, D7PaddingRowsAreEmptyRows) {
  const Batch batch = packed_batch({5, 7}, 11, 2);
  const std::vector<Batch> parts = shares(batch, 4);
  expect_every_row_once(batch, parts);
  EXPECT_EQ(parts[0].cu_seqlens, (Boundaries{0, 8, 16}));
  EXPECT_EQ(parts[0].ranges.ends, (Ids{1, 0, 9, 0}));  // positions 0 and 7 of either
  EXPECT_EQ(parts[3].ranges.ends, (Ids{4, 5, 12, 13}));
  for (const Batch& part : shares(batch, 4, 7)) {
    for (std::size_t i = 4; i < 7; ++i) {
      EXPECT_TRUE(sees_nothing(part, i));
      EXPECT_EQ(part.targets[i], -1);
    }
  }
}

// A document of one row: all ranks but one hold nothing else than padding.
TEST(CutBatch, RanksMayOwnNoRow) {
  const Batch batch = packed_batch({1}, 11, 3);
  const std::vector<Batch> parts = shares(batch, 4);
  expect_every_row_once(batch, parts);
  for (std::size_t rank = 1; rank < 4; ++rank) EXPECT_EQ(parts[rank].ranges.ends, (Ids{0, 0}));
  Batch nothing = packed_batch({0, 0}, 11, 3);
  for (const Batch& part : shares(nothing, 4)) EXPECT_EQ(part.ranges.ends, (Ids{0}));
}

// D13: an empty segment between full ones puts nobody out of step.
TEST(CutBatch, D13EmptySequencesChangeNothing) {
  const std::vector<Batch> with = shares(packed_batch({128, 0, 128}, 11, 4), 4),
                           without = shares(packed_batch({128, 128}, 11, 4), 4);
  EXPECT_EQ(with[0].cu_seqlens, (Boundaries{0, 128, 128, 256}));
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(with[rank].tokens, without[rank].tokens);
    EXPECT_EQ(with[rank].positions, without[rank].positions);
    EXPECT_EQ(with[rank].ranges.starts, without[rank].ranges.starts);
    EXPECT_EQ(with[rank].ranges.ends, without[rank].ranges.ends);
    EXPECT_EQ(with[rank].ranges.starts[32], 128);
  }
}

// F7: requests of 3 and 20 rows on eight ranks: five ranks hold no row of the first.
TEST(CutBatch, F7ShortRequestsAreCoveredOnce) {
  const Batch batch = packed_batch({3, 20}, 11, 5);
  const std::vector<Batch> parts = shares(batch, 8);
  expect_every_row_once(batch, parts);
  for (std::size_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(parts[rank].tokens.size(), 2u + 4u);
    EXPECT_EQ(sees_nothing(parts[rank], 0), rank >= 3);
    EXPECT_TRUE(sees_nothing(parts[rank], 1));
  }
}

// The token that a depth reads beside a row lies on another rank as often as not.
TEST(CutBatch, DepthsReadTheWholeSequence) {
  const Batch batch = packed_batch({11, 26, 8}, 11, 6);
  for (const std::int64_t ranks : {2, 4, 8}) expect_every_row_once(batch, shares(batch, ranks));
}

// What ranks exchange, in blocks of rows of any size: keys in order of position, and sums in the
// order of ranks of what belongs to a rank's rows.
TEST(ContextGroup, GathersAndScattersInBlocksOfAnySize) {
  const Boundaries cu = {0, 16, 16, 24};
  constexpr std::int64_t kRanks = 4, kRows = 8, kKeys = kRanks * kRows, kWidth = 3;
  const auto key = [](std::int64_t position, std::int64_t channel) {
    return static_cast<float>(position * 10 + channel);
  };
  // Of very different sizes, so that another order gives other bits.
  const auto gradient = [](std::int64_t rank, std::int64_t position, std::int64_t channel) {
    const float scale[] = {1, 1e8F, -1e8F, 1e-3F};
    return scale[(rank + position) % 4] * (1 + static_cast<float>(position * 3 + channel) / 64) / 3;
  };
  for (const std::int64_t bytes : {1, 2 * 4 * 12, 3 * 4 * 12, 7 * 4 * 12, 1 << 20}) {
    run_ranks(kRanks, [&](ThreadCommunicator& group) {
      const attention::ContextGroup context(group, ContextTables(cu, kRanks, group.rank(), kRows),
                                            bytes);
      const auto position = [&](std::int64_t row) {  // among all keys, those of padding included
        return context.tables().inverse()[static_cast<std::size_t>(group.rank() * kRows + row)];
      };
      Array mine(DType::kF32, {kRows, kWidth}), all(DType::kF32, {kKeys, kWidth});
      for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
        mine.as<float>()[i] = key(position(i / kWidth), i % kWidth);
      }
      attention::Buffer exchanged;
      context.gather(mine, all, exchanged);
      for (std::int64_t i = 0; i < kKeys * kWidth; ++i) {
        EXPECT_EQ(all.as<float>()[i], key(i / kWidth, i % kWidth)) << bytes;
        all.as<float>()[i] = gradient(group.rank(), i / kWidth, i % kWidth);
      }
      context.scatter_sum(all, mine, exchanged);
      for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
        const std::int64_t at = position(i / kWidth);
        float sum = gradient(0, at, i % kWidth);
        for (std::int64_t r = 1; r < kRanks; ++r) sum += gradient(r, at, i % kWidth);
        EXPECT_EQ(mine.as<float>()[i], sum) << bytes;
      }
      EXPECT_LE(exchanged.view().elements(), std::max<std::int64_t>(bytes, 4 * 12));
      const Array others(DType::kF64, {kRows, kWidth}), fewer(DType::kF32, {kRows - 1, kWidth});
      for (const Array* part : {&others, &fewer}) {
        EXPECT_NE(error_of([&] { context.gather(*part, all, exchanged); }).find("must be alike"),
                  std::string::npos);
        EXPECT_NE(error_of([&] { context.scatter_sum(all, *part, exchanged); }).find("alike"),
                  std::string::npos);
      }
    });
  }
}

TEST(CutBatch, RefusesWhatItCannotCut) {
  run_ranks(4, [](ThreadCommunicator& group) {
    const std::int64_t rank = group.rank();
    const auto tables = [&](const Boundaries& cu, std::int64_t rows) {
      return std::make_shared<attention::ContextGroup>(group, ContextTables(cu, 4, rank, rows));
    };
    EXPECT_NE(error_of([&] {
                tables({0, 8, 15}, 4);
              }).find("the length of sequence 1 must be a multiple of 2 cp_size = 8, got 7"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                attention::ContextGroup(group, ContextTables(Boundaries{0, 8}, 2, 1, 4));
              }).find("tables of rank 1 of 2 cannot serve rank"),
              std::string::npos);
    const Batch batch = packed_batch({8, 8}, 11, 7);
    EXPECT_NE(error_of([&] {
                cut_batch(batch, tables({0, 16}, 4));
              }).find("other sequences"),
              std::string::npos);
    const Batch mine = cut_batch(batch, tables({0, 8, 16}, 4));
    EXPECT_NE(error_of([&] {
                cut_batch(mine, tables({0, 8, 16}, 4));
              }).find("was not cut before"),
              std::string::npos);
    Batch crossing = batch;
    crossing.ranges.starts[8] = 7;
    EXPECT_NE(error_of([&] {
                share_batch(crossing, group);
              }).find("row 8 must see keys of its sequence alone, [8, 16), got [7, 9)"),
              std::string::npos);
    Batch unknown = batch;
    unknown.cu_seqlens.clear();
    EXPECT_NE(error_of([&] { share_batch(unknown, group); }).find("cu_seqlens"), std::string::npos);
    EXPECT_NE(error_of([&] { share_batch(batch, group, 3); }).find("must be at least 4, got 3"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace winnow::model
