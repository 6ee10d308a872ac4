// The selection rule on the fused and the paged path: what select_topk_test.cpp puts to scores that
// are given, put to index_topk by keys whose score is the number that the case asks for. Kinds of
// faults that users of other implementations met, each against the oracle of selection_oracle.h.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "bench/data.h"
#include "tests/each.h"
#include "tests/scored_keys.h"
#include "tests/selection_oracle.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Ids first_ids(std::int32_t n) {
  Ids ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// The parameter is the page size; 0: keys in one piece.
class FusedSelection : public ::testing::TestWithParam<int> {
 protected:
  // One row over all keys.
  static ScoredKeys row(const Floats& keys, std::int64_t k) {
    return {keys, {0}, {static_cast<std::int32_t>(keys.size())}, k, GetParam()};
  }
  static void expect_row(const Floats& keys, std::int64_t k, const Ids& want) {
    const ScoredKeys keyed = row(keys, k);
    for_each_implementation(keyed.args,
                            [&](const std::string&) { EXPECT_EQ(keyed.run()[0], want) << k; });
  }
  static void expect_row(const Floats& keys, std::int64_t k) {
    expect_row(keys, k, test::best_ids(keys, k));
  }
};

TEST_P(FusedSelection, B1VeryNegativeScoresAndMinusInfAreNotFiller) {
  Floats keys;
  for (int i = 0; i < 705; ++i) keys.push_back(-1e5f - static_cast<float>(i));
  expect_row(keys, 512, first_ids(512));
  expect_row(Floats(705, -kInf), 512, {});
  ScoredKeys kept = row(Floats(705, -kInf), 512);
  kept.args.keep_minus_inf = true;
  for_each_implementation(kept.args,
                          [&](const std::string&) { EXPECT_EQ(kept.run()[0], first_ids(512)); });
}

TEST_P(FusedSelection, B2NearlyEqualScoresOverflowNoBucket) {
  Floats keys;
  Ids want;
  for (int i = 0; i < 8000; ++i) {
    const int rank = static_cast<int>(2731ll * i % 8000);
    keys.push_back(static_cast<float>(1 + 0x1p-11 + (1 + rank) * 0x1p-23));
    if (rank >= 5952) want.push_back(i);
  }
  const ScoredKeys keyed = row(keys, 2048);
  for_each_implementation(keyed.args, [&](const std::string& name) {
    for (const int count : {1, 16}) {
      const ThreadsGuard threads(count);
      for (int repeat = 0; repeat < (name == "reference" ? 2 : 100); ++repeat)
        ASSERT_EQ(keyed.run()[0], want) << count << " threads, repeat " << repeat;
    }
  });
}

// 235 rows of one key space, each a little shorter than the one before.
TEST_P(FusedSelection, B4AnyK) {
  bench::Random random(4);
  Floats keys;
  for (int i = 0; i < 705; ++i) keys.push_back(static_cast<float>(random.gauss()));
  Ids from, to;
  for (std::int32_t i = 0; i < 235; ++i) {
    from.push_back(i / 2);
    to.push_back(705 - i % 2 * i);
  }
  for (const std::int64_t k : {1, 3, 257, 705, 2047}) {
    const ScoredKeys keyed(keys, from, to, k, GetParam());
    std::vector<Ids> want;
    for (std::size_t i = 0; i < 235; ++i)
      want.push_back(test::best_ids({keys.begin() + from[i], keys.begin() + to[i]}, k, from[i]));
    for_each_implementation(keyed.args,
                            [&](const std::string&) { EXPECT_EQ(keyed.run(), want) << k; });
  }
}

TEST_P(FusedSelection, B7TiesAtTheCutoffOverflowNoBuffer) {
  Floats keys(8320, 0.f);
  for (int j = 0; j < 100; ++j) keys[static_cast<std::size_t>(83 * j)] = 1;
  const Ids want = test::best_ids(keys, 2048);
  ASSERT_EQ(want.size(), 2048u);
  ASSERT_EQ(want.back(), 8217);
  expect_row(keys, 2048, want);
  for (float& key : keys) key = key == 1 ? kInf : 0;  // infinities are the largest, and tie
  expect_row(keys, 2048, want);
}

TEST_P(FusedSelection, B8RowsDoNotDependOnTheirNeighbours) {
  bench::Random random(8);
  Floats keys;
  for (int i = 0; i < 20000; ++i)
    keys.push_back(static_cast<float>(std::nearbyint(4 * random.gauss())));
  Ids from, to;
  for (std::int32_t i = 0; i < 16; ++i) {
    from.push_back(i);
    to.push_back(i % 2 == 0 ? i + 10 : 20000);
  }
  const ScoredKeys keyed(keys, from, to, 2048, GetParam());
  for_each_implementation(keyed.args, [&](const std::string&) {
    const std::vector<Ids> batch = keyed.run();
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(batch[i],
                test::best_ids({keys.begin() + from[i], keys.begin() + to[i]}, 2048, from[i]));
    }
  });
}

TEST_P(FusedSelection, J2PlateauOfZerosOfEitherSign) {
  Floats keys;
  for (int i = 0; i < 5000; ++i) keys.push_back(i % 2 == 0 ? 0.f : -0.f);
  for (int j = 0; j < 30; ++j) keys[static_cast<std::size_t>(4999 - 100 * j)] = 1.f + j;
  expect_row(keys, 2048);
}

TEST_P(FusedSelection, NanIsRefilledAndInfinitySelected) {
  expect_row({kNan, kInf, -kNan, 1, kInf, -kInf}, 2, {1, 4});
  expect_row({kNan, kInf, -kNan, 1, kInf, -kInf}, 6, {1, 3, 4});
  expect_row(Floats(5000, kNan), 3, {});
}

// Eight rows of a key space with sixteen different scores: ties everywhere.
TEST_P(FusedSelection, J5SixteenLevelsOnly) {
  bench::Random random(5);
  Floats keys;
  for (int i = 0; i < 4096; ++i) keys.push_back(static_cast<float>(random.below(16)));
  Ids from, to;
  std::vector<Ids> want;
  for (std::int32_t i = 0; i < 8; ++i) {
    from.push_back(i * 37);
    to.push_back(4096);
    want.push_back(test::best_ids({keys.begin() + from.back(), keys.end()}, 512, from.back()));
  }
  const ScoredKeys keyed(keys, from, to, 512, GetParam());
  for_each_implementation(keyed.args, [&](const std::string& name) {
    for (const int count : {1, 16}) {
      const ThreadsGuard threads(count);
      for (int repeat = 0; repeat < (name == "reference" ? 2 : 100); ++repeat)
        ASSERT_EQ(keyed.run(), want) << count << " threads, repeat " << repeat;
    }
  });
}

// k as large as it is allowed to be useful, below and above the number of keys.
TEST_P(FusedSelection, SixtyFiveThousandKeysAreSelected) {
  bench::Random random(9);
  Floats keys;
  for (int i = 0; i < 70000; ++i)
    keys.push_back(static_cast<float>(std::nearbyint(1000 * random.gauss())));
  for (const std::int32_t length : {65535, 65536, 65537, 70000}) {
    const ScoredKeys keyed(keys, {0}, {length}, 65536, GetParam());
    EXPECT_EQ(keyed.run()[0], test::best_ids({keys.begin(), keys.begin() + length}, 65536));
  }
}

INSTANTIATE_TEST_SUITE_P(Pages, FusedSelection, ::testing::Values(0, 64, 37), [](const auto& test) {
  return test.param == 0 ? "OnePiece" : "Of" + std::to_string(test.param);
});

// The largest key space that ids can name, in keys that exist only where they are touched: bf16
// zeros, and scores above them at both ends and in the middle. Rows see windows of it.
TEST(FusedLongRows, WindowsOfTwoToThe31Keys) {
  constexpr std::int32_t kMax = std::numeric_limits<std::int32_t>::max(), kMiddle = 1 << 30;
  constexpr std::size_t kBytes = std::size_t{kMax} * 2;
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space";
  ScoredKeys keyed(DType::kBF16, {0, kMiddle - 500, kMax - 1000, kMax - 3},
                   {1000, kMiddle + 500, kMax, kMax}, 4);
  keyed.args.index_key = make_tensor(memory, DType::kBF16, {kMax, 1});
  auto set = [&](std::int64_t key, double x) { store_double(memory, DType::kBF16, key, x); };
  set(7, kNan);
  set(999, 2);
  set(kMiddle - 1, 3);
  set(kMiddle, 4);
  set(kMax - 1, 5);
  set(kMax - 2, -kInf);
  const std::vector<Ids> want = {{0, 1, 2, 999},
                                 {kMiddle - 500, kMiddle - 499, kMiddle - 1, kMiddle},
                                 {kMax - 1000, kMax - 999, kMax - 998, kMax - 1},
                                 {kMax - 3, kMax - 1}};
  for_each_implementation(keyed.args, [&](const std::string&) { EXPECT_EQ(keyed.run(), want); });
  munmap(memory, kBytes);
}

// The same in pages: 2^31 - 64 keys by a table whose columns all name one page, in no memory.
TEST(FusedLongRows, WindowsOfTwoToThe31KeysInPages) {
  constexpr std::int64_t kPage = 64, kColumns = (std::int64_t{1} << 31) / kPage - 1;
  constexpr std::int32_t kKeys = static_cast<std::int32_t>(kColumns * kPage), kMiddle = 1 << 30;
  bench::Guarded page(DType::kF32, {1, kPage, 1}), entry(DType::kI32, {1});
  page.view().as<float>()[5] = 1;  // of every 64 keys, the sixth
  ScoredKeys keyed(DType::kF32, {0, kMiddle - 3, kKeys - 128, kKeys - 2},
                   {640, kMiddle + 100, kKeys, kKeys}, 3);
  Tensor table = make_tensor(entry.view().data, DType::kI32, {1, kColumns});
  table.strides = {0, 0};
  keyed.args.index_key = KeyView(page, table, keyed.row_request);
  const std::vector<Ids> want = {{5, 69, 133},
                                 {kMiddle - 3, kMiddle + 5, kMiddle + 69},
                                 {kKeys - 128, kKeys - 123, kKeys - 59},
                                 {kKeys - 2, kKeys - 1}};
  for_each_implementation(keyed.args, [&](const std::string&) { EXPECT_EQ(keyed.run(), want); });
}

}  // namespace
}  // namespace winnow::testing
