// Keys that a selection keeps whatever their score, and scores of -inf that are candidates.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "bench/data.h"
#include "tests/each.h"
#include "tests/paged_keys.h"
#include "tests/selection_oracle.h"
#include "winnow/index_topk.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Options {
  std::int64_t k = 1;
  std::int32_t first = 0, last = 0;
  bool minus_inf = false;
};

// The rule in words: kept keys that are no NaN, then the best of the others, all ids ascending.
Ids wanted(const Floats& scores, const Options& o) {
  const auto n = static_cast<std::int32_t>(scores.size());
  Ids members;
  Floats others = scores;
  for (std::int32_t j = 0; j < n; ++j) {
    float& score = others[static_cast<std::size_t>(j)];
    if (j < o.first || j >= n - o.last) {
      if (!std::isnan(score)) members.push_back(j);
      score = kNan;
    } else if (score == -kInf && o.minus_inf) {
      score = std::numeric_limits<float>::lowest();  // no other score of these tests is as low
    }
  }
  const auto room = o.k - static_cast<std::int64_t>(members.size());
  if (room > 0) {
    const Ids best = test::best_ids(others, room);
    members.insert(members.end(), best.begin(), best.end());
  }
  std::sort(members.begin(), members.end());
  return members;
}

// Selects in one row with every implementation; ids, length, tail and scores are as they should be.
void expect(const Floats& scores, const Options& o, const Ids& want) {
  const auto n = static_cast<std::int64_t>(scores.size());
  const Array starts = ints({1}, {0}), ends = ints({1}, {static_cast<std::int32_t>(n)});
  const Array ids(DType::kI32, {1, o.k}), lengths(DType::kI32, {1}), payload(DType::kF32, {1, o.k});
  const SelectTopkArgs args = {make_tensor(scores.data(), DType::kF32, {1, n}),
                               starts,
                               ends,
                               ids,
                               lengths,
                               payload,
                               o.minus_inf,
                               o.first,
                               o.last};
  for_each_implementation(args, [&](const std::string&) {
    std::fill_n(ids.as<std::int32_t>(), o.k, 77);
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    const auto length = static_cast<std::int64_t>(want.size());
    EXPECT_EQ(lengths.as<std::int32_t>()[0], length);
    EXPECT_EQ(Ids(ids.as<std::int32_t>(), ids.as<std::int32_t>() + length), want);
    for (std::int64_t s = 0; s < o.k; ++s) {
      if (s >= length) {
        EXPECT_EQ(ids.as<std::int32_t>()[s], -1);
      }
      EXPECT_EQ(
          payload.as<float>()[s],
          s < length ? scores[static_cast<std::size_t>(want[static_cast<std::size_t>(s)])] : -kInf);
    }
  });
}

TEST(KeptKeys, FirstAndLastAreSelectedAndCountWithinK) {
  const Floats scores = {0, 1, 9, 3, 4, 8, 2, 7, 5, -6};
  expect(scores, {.k = 4, .first = 1, .last = 1}, {0, 2, 5, 9});
  expect(scores, {.k = 4, .first = 4, .last = 0}, {0, 1, 2, 3});
  expect(scores, {.k = 4, .first = 0, .last = 4}, {6, 7, 8, 9});
  expect(scores, {.k = 4, .first = 2, .last = 2}, {0, 1, 8, 9});
  expect(scores, {.k = 4}, {2, 5, 7, 8});
}

TEST(KeptKeys, ShortRowsKeepEveryKeyOnce) {
  for (std::size_t n = 0; n <= 9; ++n) {
    const Floats scores(n, -kInf);
    Ids all(n);
    std::iota(all.begin(), all.end(), 0);
    expect(scores, {.k = 9, .first = 5, .last = 4}, all);
    expect(scores, {.k = 9, .first = 9}, all);
    expect(scores, {.k = 9, .last = 9}, all);
  }
}

// Whatever their score: -inf. But NaN is never selected, and its place is refilled.
TEST(KeptKeys, MinusInfIsKeptAndNanIsRefilled) {
  expect({-kInf, 1, 2, 3, -kInf}, {.k = 3, .first = 1, .last = 1}, {0, 3, 4});
  expect({kNan, 1, 2, 3, -kInf}, {.k = 3, .first = 1, .last = 1}, {2, 3, 4});
  expect({kNan, kNan, 2, 3, kNan}, {.k = 3, .first = 2, .last = 1}, {2, 3});
  expect({kNan, kNan, kNan}, {.k = 3, .first = 2, .last = 1}, {});
}

TEST(KeptKeys, MinusInfIsTheLowestCandidateWhereAskedFor) {
  Ids first(512);
  std::iota(first.begin(), first.end(), 0);
  expect(Floats(705, -kInf), {.k = 512, .minus_inf = true}, first);
  expect(Floats(705, -kInf), {.k = 512}, {});
  expect({-kInf, -3e38f, kNan, -kInf, -kInf, 2}, {.k = 3, .minus_inf = true}, {0, 1, 5});
  expect({-kInf, kNan, kNan, -kInf}, {.k = 4, .minus_inf = true}, {0, 3});  // no filler lane
  for (std::size_t n = 1; n <= 70; ++n) {  // every remainder of a vector
    Ids all(n);
    std::iota(all.begin(), all.end(), 0);
    expect(Floats(n, -kInf), {.k = 200, .minus_inf = true}, all);
  }
}

TEST(KeptKeys, LongRowsOfEveryKind) {
  bench::Random random(31);
  for (const std::size_t n : {1000u, 40000u, 600000u}) {
    Floats scores;
    for (std::size_t j = 0; j < n; ++j) {
      const std::int64_t kind = random.below(20);
      scores.push_back(kind == 0   ? kNan
                       : kind == 1 ? -kInf
                       : kind == 2 ? kInf
                                   : static_cast<float>(std::nearbyint(40 * random.gauss())));
    }
    Floats few(n, -kInf);
    for (std::size_t j = 5; j < n; j += 97) few[j] = static_cast<float>(random.gauss());
    for (const Options& o :
         {Options{512, 4, 128, false}, Options{512, 256, 256, true}, Options{512, 0, 0, true},
          Options{512, 512, 0, false}, Options{2048, 1, 1, true}}) {
      expect(scores, o, wanted(scores, o));
      expect(few, o, wanted(few, o));
    }
  }
}

// Kept keys of a page that is not there are no members, in index_topk as in the scores.
TEST(KeptKeys, MissingKeysAreNotKept) {
  const PagedKeys keys(DType::kF32, {40}, 4, 8, 0);
  keys.entry(0, 0) = -1;
  keys.entry(0, 4) = static_cast<std::int32_t>(keys.pages);
  bench::Random random(2);
  const Array query(DType::kF32, {1, 1, 4}), weights(DType::kF32, {1, 1});
  bench::fill_gauss(query, random);
  weights.as<float>()[0] = 1;
  const Array starts = ints({1}, {0}), ends = ints({1}, {40}), request = ints({1}, {0});
  const Array ids(DType::kI32, {1, 24}), lengths(DType::kI32, {1});
  IndexTopkArgs args = {query, keys.view(request), weights, starts, ends, true, ids, lengths, {}};
  args.keep_first = args.keep_last = 10;
  for_each_implementation(args, [&](const std::string&) {
    Scratch scratch;
    index_topk(args, scratch.get(index_topk_workspace_bytes(args)));
    Ids all(24);
    std::iota(all.begin(), all.end(), 8);  // positions 8 to 31 are all that there is
    EXPECT_EQ(Ids(ids.as<std::int32_t>(), ids.as<std::int32_t>() + 24), all);
    EXPECT_EQ(lengths.as<std::int32_t>()[0], 24);
  });
}

TEST(KeptKeys, MoreThanKIsAnError) {
  const Floats scores(8, 1.f);
  const Array starts = ints({1}, {0}), ends = ints({1}, {8});
  const Array ids(DType::kI32, {1, 4}), lengths(DType::kI32, {1});
  auto message = [&](std::int32_t first, std::int32_t last) {
    const SelectTopkArgs args = {make_tensor(scores.data(), DType::kF32, {1, 8}),
                                 starts,
                                 ends,
                                 ids,
                                 lengths,
                                 {},
                                 false,
                                 first,
                                 last};
    return error_of([&] { select_topk_workspace_bytes(args); });
  };
  EXPECT_EQ(message(2, 2), "");
  EXPECT_EQ(message(3, 2),
            "[select_topk] keep_first and keep_last must be from 0 to topk = 4 together, got 3 and "
            "2");
  EXPECT_NE(message(-1, 2), "");
  EXPECT_NE(message(2147483647, 2147483647), "");
}

}  // namespace
}  // namespace winnow::testing
