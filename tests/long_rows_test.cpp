// select_topk on rows that are long, far apart or strided: cut into spans, streamed by several
// threads, with offsets that 32 bits do not hold.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <vector>

#include "bench/data.h"
#include "tests/each.h"
#include "tests/selection_oracle.h"
#include "winnow/select_topk.h"

namespace winnow::testing {
namespace {

using Ids = std::vector<std::int32_t>;
using Floats = std::vector<float>;
constexpr std::int32_t kMaxInt = std::numeric_limits<std::int32_t>::max();

// Memory that exists only where it is touched; null if the system has no such address space.
struct Sparse {
  std::size_t bytes;
  void* data;
  explicit Sparse(std::int64_t n)
      : bytes(static_cast<std::size_t>(n)),
        data(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data == MAP_FAILED) data = nullptr;
  }
  ~Sparse() {
    if (data != nullptr) munmap(data, bytes);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
};

struct Selection {
  Array starts, ends, ids, lengths, scores;
  SelectTopkArgs args;

  Selection(const Tensor& row, std::int32_t end, std::int64_t k, std::int32_t start = 0)
      : starts(ints({1}, {start})),
        ends(ints({1}, {end})),
        ids(DType::kI32, {1, k}),
        lengths(DType::kI32, {1}),
        scores(DType::kF32, {1, k}),
        args{row, starts, ends, ids, lengths, scores} {}
  Ids run() const {
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    return {ids.as<std::int32_t>(), ids.as<std::int32_t>() + lengths.as<std::int32_t>()[0]};
  }
};

Floats gauss(std::int64_t n) {
  bench::Random random(static_cast<std::uint64_t>(n));
  Floats scores;
  for (std::int64_t i = 0; i < n; ++i)
    scores.push_back(static_cast<float>(std::nearbyint(1000 * random.gauss())));  // with ties
  return scores;
}

TEST(LongRows, SpansDependOnTheShapeAndChangeNothing) {
  for (const std::int64_t n : {(1 << 19) - 1, 1 << 19, 1500001}) {
    const Floats scores = gauss(n);
    const Selection s(make_tensor(scores.data(), DType::kF32, {1, n}), static_cast<std::int32_t>(n),
                      2048);
    const Ids want = test::best_ids(scores, 2048);
    for_each_implementation(s.args, [&](const std::string& name) {
      for (const int count : {1, 2, 17, 64}) {
        const ThreadsGuard threads(count);
        EXPECT_EQ(s.run(), want) << n << " " << count;
        if (name == "reference") break;
        EXPECT_EQ(last_selection_statistics().rows, 1);
        EXPECT_EQ(last_selection_statistics().spans, n >> 18);
      }
    });
  }
}

// Columns that no scorer wrote: poison there changes nothing, whatever spans it fills.
TEST(LongRows, PoisonPastTheRangeChangesNothing) {
  constexpr std::int64_t kWidth = 1100000;
  const Floats scores = gauss(kWidth);
  for (const std::int32_t length : {0, 1, 3000, 262144, 280001, 1099999}) {
    const Ids want = test::best_ids({scores.begin(), scores.begin() + length}, 300, 7);
    for (const float poison :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38f}) {
      Floats row = scores;
      std::fill(row.begin() + length, row.end(), poison);
      const Selection s(make_tensor(row.data(), DType::kF32, {1, kWidth}), 7 + length, 300, 7);
      EXPECT_EQ(s.run(), want) << length;
    }
  }
}

// The longest row that ids can name, in bf16: 4 GiB of zeros that are not there, and four scores.
TEST(LongRows, TwoToThe31Columns) {
  const Sparse memory(std::int64_t{kMaxInt} * 2);
  if (memory.data == nullptr) GTEST_SKIP() << "no address space";
  const Tensor row = make_tensor(memory.data, DType::kBF16, {1, kMaxInt});
  auto set = [&](std::int64_t column, double x) {
    store_double(memory.data, DType::kBF16, column, x);
  };
  set(kMaxInt - 1, 4);
  set(1ll << 30, 3);
  set((1ll << 30) + 1, -3);
  set(5, std::numeric_limits<double>::quiet_NaN());
  const ThreadsGuard threads(2);
  const Selection s(row, kMaxInt, 6);
  EXPECT_EQ(s.run(), (Ids{0, 1, 2, 3, 1 << 30, kMaxInt - 1}));  // a plateau of zeros: lowest ids
  EXPECT_EQ(s.scores.as<float>()[5], 4);
  EXPECT_EQ(last_selection_statistics().spans, 16);
}

// Columns 2^20 elements apart: 4000 of them reach beyond 2^31 elements and 2^32 bytes.
TEST(LongRows, ColumnsFarApart) {
  constexpr std::int64_t kColumns = 4000, kStride = 1 << 20;
  const Sparse memory(kColumns * kStride * 4);
  if (memory.data == nullptr) GTEST_SKIP() << "no address space";
  const Floats scores = gauss(kColumns);
  Tensor row = make_tensor(memory.data, DType::kF32, {1, kColumns});
  row.strides[1] = kStride;
  for (std::int64_t t = 0; t < kColumns; ++t)
    row.as<float>()[t * kStride] = scores[static_cast<std::size_t>(t)];
  const Selection s(row, kColumns, 100);
  for_each_implementation(
      s.args, [&](const std::string&) { EXPECT_EQ(s.run(), test::best_ids(scores, 100)); });
}

// Transposed, reversed and repeated columns.
TEST(LongRows, AnyColumnStride) {
  const Floats scores = gauss(3000);
  Floats reversed(scores.rbegin(), scores.rend());
  Tensor row = make_tensor(reversed.data() + 2999, DType::kF32, {1, 3000});
  row.strides[1] = -1;
  const Selection backwards(row, 3000, 64);
  row.strides[1] = 0;
  const Selection constant(row, 3000, 3);
  for_each_implementation(backwards.args, [&](const std::string& name) {
    EXPECT_EQ(backwards.run(), test::best_ids(scores, 64));
    pin_implementation("select_topk", name);
    EXPECT_EQ(constant.run(), (Ids{0, 1, 2}));
  });
}

// Where a sample misleads, a row is streamed once more, and counted.
TEST(LongRows, RepairsAreCounted) {
  constexpr std::int64_t kWidth = 131072;
  Floats plain = gauss(kWidth), hidden = plain;
  // Large scores in all sampled places, so that too few others reach the floor.
  for (std::int64_t p = 0; p < 256; ++p) {
    for (std::int64_t i = 0; i < 16; ++i)
      hidden[static_cast<std::size_t>(p * (kWidth - 16) / 255 + i)] =
          1e6f + static_cast<float>(p * 16 + i);
  }
  struct Row {
    const Floats* scores;
    int k, repairs;
  };
  for (const Row& row : {Row{&plain, 2048, 0}, Row{&hidden, 8192, 1}, Row{&plain, 50000, 0}}) {
    const Selection s(make_tensor(row.scores->data(), DType::kF32, {1, kWidth}), kWidth, row.k);
    const Ids want = test::best_ids(*row.scores, row.k);
    for_each_implementation(s.args, [&](const std::string& name) {
      EXPECT_EQ(s.run(), want);
      EXPECT_EQ(last_selection_statistics().repairs, name == "reference" ? 0 : row.repairs)
          << row.k;
    });
  }
}

}  // namespace
}  // namespace winnow::testing
