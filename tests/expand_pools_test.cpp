// expand_pools: which tokens come of which pools, in what order, at what width.
#include "winnow/expand_pools.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <vector>

#include "base/array.h"
#include "tests/each.h"
#include "winnow/validation.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;

struct Row {
  Ids pools;
  std::int32_t start, end;
};

// The lists of rows that share a pool size, by every implementation (which must agree).
struct Call {
  std::int64_t pool_size, topk;
  bool tail;
  Ids bases;  // empty: left out

  std::vector<Ids> run(const std::vector<Row>& rows) const {
    const auto n = static_cast<std::int64_t>(rows.size());
    const std::int64_t selected = topk / pool_size, width = topk + (tail ? pool_size - 1 : 0);
    const Array pools(DType::kI32, {n, selected}), starts(DType::kI32, {n}), ends(DType::kI32, {n}),
        indices(DType::kI32, {n, width}), lengths(DType::kI32, {n});
    for (std::int64_t i = 0; i < n; ++i) {
      const Row& row = rows[static_cast<std::size_t>(i)];
      std::fill_n(pools.as<std::int32_t>() + i * selected, selected, -1);
      std::copy(row.pools.begin(), row.pools.end(), pools.as<std::int32_t>() + i * selected);
      starts.as<std::int32_t>()[i] = row.start;
      ends.as<std::int32_t>()[i] = row.end;
    }
    ExpandPoolsArgs args{pools, {}, starts, ends, pool_size, tail, indices, lengths};
    if (!bases.empty()) {
      args.pool_bases = make_tensor(bases.data(), DType::kI32, {std::ssize(bases)});
    }
    std::vector<Ids> lists;
    for_each_implementation(args, [&](const std::string&) {
      std::fill_n(indices.as<std::int32_t>(), indices.elements(), 77);
      expand_pools(args, {});
      std::vector<Ids> own;
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t* list = indices.as<std::int32_t>() + i * width;
        const std::int32_t length = lengths.as<std::int32_t>()[i];
        own.emplace_back(list, list + length);
        for (std::int64_t s = length; s < width; ++s) EXPECT_EQ(list[s], -1) << i;
      }
      if (lists.empty()) lists = own;
      EXPECT_EQ(lists, own);
    });
    return lists;
  }
  Ids one(const Row& row) const { return run({row}).front(); }
};

TEST(ExpandPools, TokensOfPoolsThenTheTail) {
  const Call tail{4, 16, true, {}}, none{4, 16, false, {}};
  EXPECT_EQ(tail.one({{0, 2}, 0, 14}), (Ids{0, 1, 2, 3, 8, 9, 10, 11, 12, 13}));
  EXPECT_EQ(none.one({{0, 2}, 0, 14}), (Ids{0, 1, 2, 3, 8, 9, 10, 11}));
  // A row that completes its pool has no tail: itself it sees only if its pool was selected.
  EXPECT_EQ(tail.one({{0}, 0, 12}), (Ids{0, 1, 2, 3}));
  // Before the first whole pool there is the tail alone, or nothing.
  EXPECT_EQ(tail.one({{}, 0, 3}), (Ids{0, 1, 2}));
  EXPECT_EQ(none.one({{}, 0, 3}), Ids{});
}

TEST(ExpandPools, TheWidestRowFillsItsList) {
  const Call call{4, 16, true, {}};
  EXPECT_EQ(call.one({{0, 1, 2, 3}, 0, 19}).size(), 19u);
  EXPECT_EQ(call.one({{1, 2, 3, 4}, 0, 27}).size(), 19u);
}

TEST(ExpandPools, PoolsOfOneAreTheirOwnTokens) {
  const Call call{1, 5, true, {}};
  EXPECT_EQ(call.one({{0, 3, 7}, 0, 9}), (Ids{0, 3, 7}));
}

TEST(ExpandPools, BasesSayWherePoolsBegin) {
  const Call call{3, 6, true, {2, 5, 20}};  // the third pool belongs to the next sequence
  EXPECT_EQ(call.one({{0, 1}, 2, 10}), (Ids{2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(call.one({{2}, 20, 24}), (Ids{20, 21, 22, 23}));
}

// Tokens outside the row's range are absent, whole pools or parts of them.
TEST(ExpandPools, OutsideTheRangeIsAbsent) {
  const Call call{4, 12, false, {}};
  EXPECT_EQ(call.one({{0, 1, 2}, 2, 7}), (Ids{2, 3, 4, 5, 6}));
  EXPECT_EQ(call.one({{3}, 0, 12}), Ids{});
  EXPECT_EQ(call.one({{0, 1, 2}, -5, 6}), (Ids{0, 1, 2, 3, 4, 5}));
}

// A range that does not begin on the grid: the tail and a pool may both claim a token.
TEST(ExpandPools, ATokenStandsOnce) {
  const Call call{4, 8, true, {}};
  const Ids list = call.one({{0, 1}, 3, 8});  // five tokens: a tail of one, token 7
  EXPECT_EQ(list, (Ids{3, 4, 5, 6, 7}));
}

TEST(ExpandPools, IdsOfNoPoolAreSkippedWhereverTheyStand) {
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min(),
                         kMax = std::numeric_limits<std::int32_t>::max();
  const Row row{{-1, 1, kMin, kMax}, 0, 40};
  EXPECT_EQ((Call{4, 16, true, {}}).one(row), (Ids{4, 5, 6, 7}));
  EXPECT_EQ((Call{4, 16, true, {0, 4}}).one(row), (Ids{4, 5, 6, 7}));
  EXPECT_EQ((Call{4, 16, false, {0, -4}}).one(row), Ids{});
}

TEST(ExpandPools, EmptyRowsAndNoRows) {
  const Call call{4, 8, true, {}};
  EXPECT_EQ(call.run({{{0}, 5, 5}, {{0}, 9, 4}, {{0}, 3, -1}, {{0, 1}, 0, 8}}),
            (std::vector<Ids>{{}, {}, {}, {0, 1, 2, 3, 4, 5, 6, 7}}));
  EXPECT_EQ(call.run({}), std::vector<Ids>{});
}

// The last positions that an int holds.
TEST(ExpandPools, NothingOverflows) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max();
  const Call call{4, 8, true, {}};
  EXPECT_EQ(call.one({{kMax / 4 - 1, kMax / 4}, 0, kMax}),
            (Ids{kMax - 7, kMax - 6, kMax - 5, kMax - 4, kMax - 3, kMax - 2, kMax - 1}));
  EXPECT_EQ((Call{4, 8, true, {kMax - 1}}).one({{0}, kMax - 2, kMax}), (Ids{kMax - 2, kMax - 1}));
}

TEST(ExpandPools, ValidationNamesRowAndValue) {
  struct Guard {
    Guard() { set_validation(true); }
    ~Guard() { set_validation(false); }
  } const on;
  const Call call{4, 16, true, {0, 4, 8, 10}};
  EXPECT_EQ(call.one({{0, 1, 2}, 0, 12}).size(), 12u);
  const auto error = [&](const Row& row) { return error_of([&] { call.run({{{}, 0, 9}, row}); }); };
  EXPECT_EQ(error({{0, -1, 4}, 0, 12}),
            "[expand_pools] pool_indices must be -1 or one of 4 pools, got 4 in row 1 slot 2");
  EXPECT_EQ(
      error({{1, 0}, 0, 12}),
      "[expand_pools] the pools of a row must ascend and share no token, got pool 0 from token "
      "0 behind token 7 in row 1");
  EXPECT_EQ(
      error({{2, 3}, 0, 12}),
      "[expand_pools] the pools of a row must ascend and share no token, got pool 3 from token "
      "10 behind token 11 in row 1");
  EXPECT_EQ(error({{}, 4, 3}),
            "[expand_pools] ends must not be below starts, got 3 and 4 in row 1");
}

TEST(ExpandPools, ErrorsNameTheRule) {
  const Array pools(DType::kI32, {2, 4}), range(DType::kI32, {2}), indices(DType::kI32, {2, 19}),
      lengths(DType::kI32, {2});
  auto message = [&](auto&& change) {
    ExpandPoolsArgs args{pools, {}, range, range, 4, true, indices, lengths};
    change(args);
    return error_of([&] { expand_pools(args, {}); });
  };
  EXPECT_EQ(message([](ExpandPoolsArgs&) {}), "");
  EXPECT_EQ(message([](ExpandPoolsArgs& a) { a.topk_indices.shape[1] = 18; }),
            "[expand_pools] topk must be a positive multiple of pool_size 4, got 15 (18 columns, 3 "
            "of them for the tail)");
  EXPECT_EQ(message([](ExpandPoolsArgs& a) { a.always_select_tail = false; }),
            "[expand_pools] topk must be a positive multiple of pool_size 4, got 19 (19 columns)");
  EXPECT_EQ(
      message([](ExpandPoolsArgs& a) { a.topk_indices.shape[1] = 3; }),
      "[expand_pools] topk must be a positive multiple of pool_size 4, got 0 (3 columns, 3 of "
      "them for the tail)");
  EXPECT_EQ(message([](ExpandPoolsArgs& a) { a.pool_indices.shape[1] = 3; }),
            "[expand_pools] pool_indices must have topk / pool_size = 4 columns, got 3");
  EXPECT_EQ(message([](ExpandPoolsArgs& a) { a.pool_size = 0; }),
            "[expand_pools] pool_size must be from 1 to 2147483647, got 0");
}

}  // namespace
}  // namespace winnow::testing
