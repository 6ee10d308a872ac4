// Context parallel tables: the numbers of the contract, and what every layout must satisfy.
#include "winnow/context_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "winnow/error.h"

namespace winnow {
namespace {

using Numbers = std::vector<std::int64_t>;

TEST(ContextParallel, PositionsOfARank) {
  EXPECT_EQ(context_parallel_positions(Numbers{0, 3, 7}, 1, 0, 7), (Numbers{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(context_parallel_positions(Numbers{0, 8, 8, 16}, 2, 0, 8),
            (Numbers{0, 1, 6, 7, 8, 9, 14, 15}));
  EXPECT_EQ(context_parallel_positions(Numbers{0, 8, 8, 16}, 2, 1, 8),
            (Numbers{2, 3, 4, 5, 10, 11, 12, 13}));
  EXPECT_EQ(context_parallel_positions(Numbers{0, 16}, 4, 2, 4), (Numbers{4, 5, 10, 11}));
  // Padding: behind the sequences; a rank may hold nothing else.
  EXPECT_EQ(context_parallel_positions(Numbers{0, 0, 0}, 4, 3, 2), (Numbers{6, 7}));
  EXPECT_EQ(context_parallel_positions(Numbers{0, 8}, 2, 0, 6), (Numbers{0, 1, 6, 7, 8, 9}));
  EXPECT_EQ(context_parallel_positions(Numbers{0, 8}, 2, 1, 6), (Numbers{2, 3, 4, 5, 14, 15}));
}

TEST(ContextParallel, OrderOfTheGatheredKeys) {
  EXPECT_EQ(context_parallel_key_order(Numbers{0, 8}, 2, 6),
            (Numbers{0, 1, 6, 7, 8, 9, 2, 3, 4, 5, 10, 11}));
  EXPECT_EQ(context_parallel_key_order(Numbers{0, 16}, 4, 4),
            (Numbers{0, 1, 4, 5, 8, 9, 12, 13, 14, 15, 10, 11, 6, 7, 2, 3}));
  EXPECT_EQ(context_parallel_key_order(Numbers{0, 16}, 2, 8),
            (Numbers{0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 4, 5, 6, 7}));
}

// Every position once over all ranks; the order sorts them; its inverse takes them back.
TEST(ContextParallel, OrdersArePermutations) {
  for (const std::int64_t cp : {1, 2, 4, 8}) {
    const Numbers cu = {0, 6 * cp, 6 * cp, 8 * cp, 18 * cp};
    for (const std::int64_t rows : {18, 21}) {
      Numbers gathered;
      for (std::int64_t rank = 0; rank < cp; ++rank) {
        const Numbers mine = context_parallel_positions(cu, cp, rank, rows);
        gathered.insert(gathered.end(), mine.begin(), mine.end());
      }
      const Numbers order = context_parallel_key_order(cu, cp, rows);
      Numbers sorted;
      for (const std::int64_t from : order)
        sorted.push_back(gathered[static_cast<std::size_t>(from)]);
      EXPECT_TRUE(std::is_sorted(sorted.begin(), sorted.end()));
      EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
      const Numbers inverse = inverse_order(order);
      for (std::size_t i = 0; i < order.size(); ++i) {
        EXPECT_EQ(inverse[static_cast<std::size_t>(order[i])], static_cast<std::int64_t>(i));
      }
    }
  }
}

std::string refusal(const Numbers& cu, std::int64_t cp, std::int64_t rank, std::int64_t rows) {
  try {
    context_parallel_positions(cu, cp, rank, rows);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ContextParallel, UnpaddedLengthsAreRefused) {
  EXPECT_NE(
      refusal({0, 8, 14}, 2, 0, 7)
          .find("the length of sequence 1 must be a multiple of 2 cp_size = 4, got 6: pad it"),
      std::string::npos);
  EXPECT_NE(refusal({0, 8}, 2, 0, 3).find("local_rows must be at least 4, got 3"),
            std::string::npos);
  EXPECT_NE(refusal({0, 8}, 2, 2, 4).find("cp_rank must be from 0 to 1, got 2"), std::string::npos);
  EXPECT_NE(refusal({0, 8}, 0, 0, 4).find("cp_size must be"), std::string::npos);
  EXPECT_NE(refusal({0, 8, 4}, 1, 0, 8).find("must not fall"), std::string::npos);
  EXPECT_NE(refusal({}, 1, 0, 8).find("must begin with 0"), std::string::npos);
  EXPECT_THROW(inverse_order(Numbers{0, 0}), Error);
  EXPECT_THROW(inverse_order(Numbers{0, 2}), Error);
}

void expect_tables(const ContextTables& tables, const Numbers& cu, const ContextGeometry& g) {
  const auto equal = [](std::span<const std::int64_t> a, const Numbers& b) {
    return std::ranges::equal(a, b);
  };
  const Numbers order = context_parallel_key_order(cu, g.cp_size, g.local_rows);
  EXPECT_EQ(tables.geometry(), g);
  EXPECT_EQ(tables.keys(), g.cp_size * g.local_rows);
  EXPECT_TRUE(equal(tables.cu_seqlens(), cu));
  EXPECT_TRUE(equal(tables.positions(),
                    context_parallel_positions(cu, g.cp_size, g.cp_rank, g.local_rows)));
  EXPECT_TRUE(equal(tables.key_order(), order));
  EXPECT_TRUE(equal(tables.inverse(), inverse_order(order)));
}

TEST(ContextTables, HoldWhatARankNeeds) {
  for (const std::int64_t rank : {0, 1}) {
    const Numbers cu = {0, 8, 8, 16};
    expect_tables(ContextTables(cu, 2, rank, 8), cu, {2, rank, 8, true});
    expect_tables(ContextTables(cu, 2, rank, 9), cu, {2, rank, 9, false});
  }
  expect_tables(ContextTables(Numbers{0, 0, 0}, 4, 3, 2), {0, 0, 0}, {4, 3, 2, false});
}

// Other sequences of equal geometry, in the memory of the old ones; nothing else, and then the old
// ones stay.
TEST(ContextTables, AreRefreshedInPlace) {
  ContextTables tables(Numbers{0, 8, 16}, 2, 1, 8);
  const std::int64_t* memory[] = {tables.positions().data(), tables.key_order().data(),
                                  tables.inverse().data()};
  const Numbers fresh = {0, 4, 4, 12, 16};
  tables.refresh(fresh);
  expect_tables(tables, fresh, {2, 1, 8, true});
  EXPECT_EQ(tables.version(), 1);
  for (const Numbers& other : {Numbers{0, 12}, Numbers{0, 20}, Numbers{0, 7, 16}}) {
    EXPECT_THROW(tables.refresh(other), Error);
  }
  expect_tables(tables, fresh, {2, 1, 8, true});
  EXPECT_EQ(tables.version(), 1);
  EXPECT_EQ(tables.positions().data(), memory[0]);
  EXPECT_EQ(tables.key_order().data(), memory[1]);
  EXPECT_EQ(tables.inverse().data(), memory[2]);
}

}  // namespace
}  // namespace winnow
