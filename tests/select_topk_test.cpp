// Kinds of faults that users of other implementations met, on every implementation of select_topk.
#include "winnow/select_topk.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <limits>

#include "base/array.h"
#include "base/numbers.h"
#include "bench/data.h"
#include "tests/each.h"
#include "tests/selection_oracle.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class SelectTopk : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const Floats one(1);
    SelectTopkArgs args;
    const Array out(DType::kI32, {1, 1}), length(DType::kI32, {1}), range(DType::kI32, {1});
    args.scores = make_tensor(one.data(), DType::kF32, {1, 1});
    args.starts = args.ends = range;
    args.topk_indices = out;
    args.topk_lengths = length;
    for (const Verdict& v : explain(args).verdicts) {
      if (v.implementation == GetParam() && !v.refusal.empty()) GTEST_SKIP() << v.refusal;
    }
    pin_implementation("select_topk", GetParam());
  }
  void TearDown() override { pin_implementation("select_topk", ""); }

  // Of what must not depend on a schedule; the reference is serial and slow.
  static int repeats() { return std::string(GetParam()) == "reference" ? 2 : 100; }

  struct Result {
    std::vector<Ids> ids;  // valid ones
    std::vector<Floats> scores;
  };

  // Selects in a score tensor; checks the tails, the lengths and that ids lie in their range.
  static Result select(const Tensor& scores, const Ids& starts, const Ids& ends, std::int64_t k) {
    const auto rows = static_cast<std::int64_t>(starts.size());
    const Array indices(DType::kI32, {rows, k}), lengths(DType::kI32, {rows}),
        payload(DType::kF32, {rows, k});
    const SelectTopkArgs args = {scores,
                                 make_tensor(starts.data(), DType::kI32, {rows}),
                                 make_tensor(ends.data(), DType::kI32, {rows}),
                                 indices,
                                 lengths,
                                 payload};
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    Result result;
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int32_t* id = indices.as<std::int32_t>() + i * k;
      const float* score = payload.as<float>() + i * k;
      const std::int32_t n = lengths.as<std::int32_t>()[i];
      for (std::int64_t s = n; s < k; ++s) {
        EXPECT_EQ(id[s], -1);
        EXPECT_EQ(score[s], -kInf);
      }
      for (std::int64_t s = 0; s < n; ++s) {
        EXPECT_GE(id[s], std::max(0, starts[static_cast<std::size_t>(i)]));
        EXPECT_LT(id[s], ends[static_cast<std::size_t>(i)]);
      }
      result.ids.emplace_back(id, id + n);
      result.scores.emplace_back(score, score + n);
    }
    return result;
  }
  static Ids select_row(const Floats& scores, std::int64_t k) {
    const auto n = static_cast<std::int64_t>(scores.size());
    return select(make_tensor(scores.data(), DType::kF32, {1, n}), {0},
                  {static_cast<std::int32_t>(n)}, k)
        .ids[0];
  }
};

Ids first_ids(std::int32_t n) {
  Ids ids;
  for (std::int32_t i = 0; i < n; ++i) ids.push_back(i);
  return ids;
}

TEST_P(SelectTopk, VeryNegativeScoresAndMinusInfAreNotFiller) {
  Floats scores;
  for (int i = 0; i < 705; ++i) scores.push_back(-1e5f - static_cast<float>(i));
  EXPECT_EQ(select_row(scores, 512), first_ids(512));
  EXPECT_EQ(select_row(Floats(705, -kInf), 512), Ids{});
}

TEST_P(SelectTopk, NearlyEqualScoresOverflowNoBucket) {
  Floats scores;
  Ids want;
  for (int i = 0; i < 8000; ++i) {
    const int rank = static_cast<int>(2731ll * i % 8000);
    scores.push_back(static_cast<float>(1 + 0x1p-11 + (1 + rank) * 0x1p-23));
    if (rank >= 5952) want.push_back(i);
  }
  for (const int count : {1, 16}) {
    const testing::ThreadsGuard threads(count);
    for (int repeat = 0; repeat < repeats(); ++repeat) ASSERT_EQ(select_row(scores, 2048), want);
  }
}

TEST_P(SelectTopk, AnyK) {
  bench::Random random(4);
  Floats scores;
  for (int i = 0; i < 705; ++i) scores.push_back(static_cast<float>(random.gauss()));
  for (std::int64_t k : {1, 2, 3, 257, 511, 704, 705, 706, 2047, 65536, 100000}) {
    EXPECT_EQ(select_row(scores, k), test::best_ids(scores, k)) << k;
  }
}

// B4: 235 rows, where an odd k above the number of lanes once had no code for its last element.
TEST_P(SelectTopk, AnyKOfManyRows) {
  constexpr std::int64_t kRows = 235, kWidth = 705;
  bench::Random random(6);
  Floats scores;
  for (std::int64_t i = 0; i < kRows * kWidth; ++i)
    scores.push_back(static_cast<float>(random.gauss()));
  const Tensor t = make_tensor(scores.data(), DType::kF32, {kRows, kWidth});
  for (const std::int64_t k : {1, 3, 257, 705, 2047}) {
    const std::vector<Ids> ids = select(t, Ids(kRows, 0), Ids(kRows, kWidth), k).ids;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const auto first = scores.begin() + i * kWidth;
      EXPECT_EQ(ids[static_cast<std::size_t>(i)], test::best_ids({first, first + kWidth}, k)) << k;
    }
  }
}

TEST_P(SelectTopk, NegativeAndEmptyRanges) {
  const Floats scores(3 * 8, 1.f);
  const Tensor t = make_tensor(scores.data(), DType::kF32, {3, 8});
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min();
  EXPECT_EQ(select(t, {0, 0, 0}, {-1, 0, 5}, 4).ids, (std::vector<Ids>{{}, {}, {0, 1, 2, 3}}));
  EXPECT_EQ(select(t, {5, -3, kMin}, {2, 2, 9}, 4).ids,
            (std::vector<Ids>{{}, {0, 1}, {0, 1, 2, 3}}));
}

TEST_P(SelectTopk, TiesAtTheCutoffOverflowNoBuffer) {
  Floats scores(8320, 0.f);
  for (int j = 0; j < 100; ++j) scores[static_cast<std::size_t>(83 * j)] = 1;
  const Ids ids = select_row(scores, 2048);
  ASSERT_EQ(ids.size(), 2048u);
  EXPECT_EQ(ids.back(), 8217);
  EXPECT_EQ(ids, test::best_ids(scores, 2048));
  Ids zeros;
  for (std::int32_t id : ids)
    if (id % 83 != 0) zeros.push_back(id);
  EXPECT_EQ(zeros.size(), 1948u);
  EXPECT_EQ(zeros.back(), 1971);
}

TEST_P(SelectTopk, PlateauOfZerosOfEitherSign) {
  for (const std::int64_t width : {5000, 40000}) {
    Floats scores;
    for (std::int64_t i = 0; i < width; ++i) scores.push_back(i % 2 == 0 ? 0.f : -0.f);
    for (std::int64_t j = 0; j < 30; ++j)
      scores[static_cast<std::size_t>(width - 1 - 100 * j)] = 1 + static_cast<float>(j);
    EXPECT_EQ(select_row(scores, 2048), test::best_ids(scores, 2048));
  }
}

TEST_P(SelectTopk, PayloadKeepsTheBitsOfTheScores) {
  const Floats scores = {-0.f, 0.f, 0x1p-149f, kInf, -0x1p-149f, -3.4e38f, kNan};
  const Result r = select(make_tensor(scores.data(), DType::kF32, {1, 7}), {0}, {7}, 6);
  ASSERT_EQ(r.ids[0], (Ids{0, 1, 2, 3, 4, 5}));
  for (std::size_t s = 0; s < 6; ++s) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(r.scores[0][s]),
              std::bit_cast<std::uint32_t>(scores[s]));
  }
}

TEST_P(SelectTopk, NanAndInfinities) {
  EXPECT_EQ(select_row({kNan, kInf, -kNan, 1, kInf, -kInf}, 2), (Ids{1, 4}));
  EXPECT_EQ(select_row({kNan, kInf, -kNan, 1, kInf, -kInf}, 6), (Ids{1, 3, 4}));
  EXPECT_EQ(select_row(Floats(40000, kNan), 3), Ids{});
}

TEST_P(SelectTopk, RowsDoNotDependOnTheirNeighbours) {
  bench::Random random(8);
  constexpr std::int64_t kRows = 16, kWidth = 20000;
  Floats scores;
  for (std::int64_t i = 0; i < kRows * kWidth; ++i)
    scores.push_back(static_cast<float>(std::nearbyint(4 * random.gauss())));
  Ids starts, ends;
  for (std::int32_t i = 0; i < kRows; ++i) {
    starts.push_back(i);
    ends.push_back(i + (i % 2 == 0 ? 10 : static_cast<std::int32_t>(kWidth)));
  }
  const Tensor t = make_tensor(scores.data(), DType::kF32, {kRows, kWidth});
  const std::vector<Ids> batch = select(t, starts, ends, 2048).ids;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto r = static_cast<std::size_t>(i);
    EXPECT_EQ(batch[r], select(t.rows(i, 1), {starts[r]}, {ends[r]}, 2048).ids[0]);
    const auto first = scores.begin() + i * kWidth;
    EXPECT_EQ(batch[r], test::best_ids({first, first + (ends[r] - starts[r])}, 2048, starts[r]));
  }
}

TEST_P(SelectTopk, IdsAreOfTheKeySpace) {
  Floats scores(2 * 12, 0.f);
  scores[3] = 9;
  const Tensor t = make_tensor(scores.data(), DType::kF32, {2, 12});
  EXPECT_EQ(select(t.channels(0, 8), {100, 5}, {108, 12}, 1).ids, (std::vector<Ids>{{103}, {5}}));
  // A range wider than the matrix ends with it.
  EXPECT_EQ(select(t.channels(0, 3), {100, 5}, {200, 7}, 5).ids,
            (std::vector<Ids>{{100, 101, 102}, {5, 6}}));
}

TEST_P(SelectTopk, LongRows) {
  for (const std::int64_t n : {32768, 32769, 65536, 262144}) {
    bench::Random random(static_cast<std::uint64_t>(n));
    Floats scores;
    for (std::int64_t i = 0; i < n; ++i) scores.push_back(static_cast<float>(random.gauss()));
    EXPECT_EQ(select_row(scores, 2048), test::best_ids(scores, 2048)) << n;
  }
}

// J5, on 16 rows, so that every thread has some.
TEST_P(SelectTopk, SixteenLevelsOnly) {
  constexpr std::int64_t kRows = 16, kWidth = 4096;
  bench::Random random(5);
  Floats scores;
  for (std::int64_t i = 0; i < kRows * kWidth; ++i)
    scores.push_back(static_cast<float>(random.below(16)));
  std::vector<Ids> want;
  for (std::int64_t i = 0; i < kRows; ++i) {
    const auto first = scores.begin() + i * kWidth;
    want.push_back(test::best_ids({first, first + kWidth}, 512));
  }
  const Tensor t = make_tensor(scores.data(), DType::kF32, {kRows, kWidth});
  for (const int count : {1, 16}) {
    const testing::ThreadsGuard threads(count);
    for (int repeat = 0; repeat < repeats(); ++repeat)
      ASSERT_EQ(select(t, Ids(kRows, 0), Ids(kRows, kWidth), 512).ids, want) << repeat;
  }
}

TEST_P(SelectTopk, HalfPrecisionEqualsTheSameValuesInF32) {
  bench::Random random(14);
  for (const std::int64_t n : {33, 30001}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      const Array half(dtype, {1, n}), full(DType::kF32, {1, n});
      for (std::int64_t i = 0; i < n; ++i) {
        store_double(half.view().data, dtype, i, random.gauss() * (i % 7 == 0 ? 1e-6 : 1));
        full.as<float>()[i] = static_cast<float>(load_double(half.view().data, dtype, i));
      }
      const Ids ends = {static_cast<std::int32_t>(n)};
      const Result a = select(half, {0}, ends, 5), b = select(full, {0}, ends, 5);
      EXPECT_EQ(a.ids, b.ids);
      EXPECT_EQ(a.scores, b.scores);
    }
  }
}

// Columns past the range are never read: poison there changes nothing.
TEST_P(SelectTopk, PoisonPastTheRangeChangesNothing) {
  bench::Random random(3);
  constexpr std::int64_t kWidth = 128;
  for (std::int32_t length = 0; length <= 70; ++length) {
    Floats scores;
    for (std::int32_t i = 0; i < length; ++i) scores.push_back(static_cast<float>(random.gauss()));
    const Ids want = test::best_ids(scores, 7);
    for (const float poison : {kNan, kInf, 3e38f}) {
      Floats row = scores;
      row.resize(kWidth, poison);
      const Tensor t = make_tensor(row.data(), DType::kF32, {1, kWidth});
      EXPECT_EQ(select(t, {0}, {length}, 7).ids[0], want) << length;
    }
  }
}

// Two rows 2^31, then 2^32 elements apart, in memory that exists only where it is touched.
TEST_P(SelectTopk, RowsFartherApartThan32BitsReach) {
  for (const std::int64_t stride : {(1ll << 31) + 64, (1ll << 32) + 64}) {
    const std::size_t bytes = static_cast<std::size_t>(stride + 64) * sizeof(float);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    auto* scores = static_cast<float*>(memory);
    scores[3] = 1;
    scores[stride + 5] = 1;
    Tensor t = make_tensor(scores, DType::kF32, {2, 8});
    t.strides[0] = stride;
    EXPECT_EQ(select(t, {0, 0}, {8, 8}, 1).ids, (std::vector<Ids>{{3}, {5}}));
    munmap(memory, bytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, SelectTopk,
                         ::testing::Values("cpu.avx512", "cpu.avx2", "cpu.portable", "reference"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST(SelectTopkErrors, ComeBeforeAnyWrite) {
  const Floats scores(8, 1.f);
  const Ids ends = {8};
  Array starts(DType::kI32, {1});
  Array indices(DType::kI32, {1, 4}), lengths(DType::kI32, {1}), payload(DType::kF32, {1, 4});
  indices.as<std::int32_t>()[0] = 77;
  const SelectTopkArgs good = {make_tensor(scores.data(), DType::kF32, {1, 8}),
                               starts,
                               make_tensor(ends.data(), DType::kI32, {1}),
                               indices,
                               lengths,
                               payload};
  auto message = [&](auto&& change) {
    SelectTopkArgs args = good;
    change(args);
    try {
      Scratch scratch;
      select_topk(args, scratch.get(1 << 20));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.scores.dtype = DType::kI32; }),
            "[select_topk] scores must be of dtype f64, f32, bf16, f16, got i32");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_lengths.dtype = DType::kF32; }),
            "[select_topk] topk_lengths must be of dtype i32, got f32");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_scores.dtype = DType::kF16; }),
            "[select_topk] topk_scores must be of dtype f32, got f16");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_indices.shape[1] = 0; }),
            "[select_topk] topk must be at least 1, got 0");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_scores.shape[1] = 3; }),
            "[select_topk] topk_scores must be [rows, topk] = [1, 4], got f32 [1, 3]");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.ends.shape[0] = 2; }),
            "[select_topk] ends must be [rows] = [1], got i32 [2]");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_scores.data = a.topk_indices.data; }),
            "[select_topk] topk_scores must not share memory with topk_indices, but they overlap");
  EXPECT_EQ(message([](SelectTopkArgs& a) { a.topk_indices.data = a.scores.data; }),
            "[select_topk] topk_indices must not share memory with scores, but they overlap");
  EXPECT_EQ(indices.as<std::int32_t>()[0], 77);
}

}  // namespace
}  // namespace winnow
