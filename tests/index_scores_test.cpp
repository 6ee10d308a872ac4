// index_scores against scalar loops in the order that the kernels state, and its edges.
#include "winnow/index_scores.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/array.h"
#include "base/numbers.h"
#include "bench/data.h"
#include "winnow/error.h"
#include "winnow/threads.h"

namespace winnow {
namespace {

using Ids = std::vector<std::int32_t>;

struct Inputs {
  Array query, key, weights, starts, ends;
  Inputs(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim,
         const char* range = "full")
      : query(dtype, {rows, heads, dim}),
        key(dtype, {keys, dim}),
        weights(DType::kF32, {rows, heads}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}) {
    bench::Random random(11);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random);
    bench::fill_ranges(range, keys, 16, starts, ends, random);
  }
  IndexScoresArgs args(const Tensor& scores, bool relu = true) const {
    return {query, key, weights, starts, ends, relu, scores};
  }
};

void run(const IndexScoresArgs& args) {
  Scratch scratch;
  index_scores(args, scratch.get(index_scores_workspace_bytes(args)));
}

std::vector<std::string> fast_implementations(const IndexScoresArgs& args) {
  std::vector<std::string> names;
  for (const Verdict& v : explain(args).verdicts) {
    if (v.refusal.empty() && v.implementation != "reference") names.push_back(v.implementation);
  }
  return names;
}

struct Pin {
  explicit Pin(const std::string& name) { pin_implementation("index_scores", name); }
  ~Pin() { pin_implementation("index_scores", ""); }
};

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// dot: one chain over d; score: one chain over h. Fused on AVX2, rounded twice in portable code.
float scalar_score(const Inputs& in, std::int64_t i, std::int64_t j, bool relu, bool fused) {
  auto step = [&](float a, float b, float c) {
    if (fused) return std::fma(a, b, c);
    const volatile float product = a * b;
    return product + c;
  };
  auto at = [](const Array& a, std::int64_t n) {
    return static_cast<float>(load_double(a.view().data, a.view().dtype, n));
  };
  const std::int64_t heads = in.query.view().shape[1], dim = in.query.view().shape[2];
  float score = 0;
  for (std::int64_t h = 0; h < heads; ++h) {
    float dot = 0;
    for (std::int64_t d = 0; d < dim; ++d)
      dot = step(at(in.query, (i * heads + h) * dim + d), at(in.key, j * dim + d), dot);
    score = step(at(in.weights, i * heads + h), relu && dot < 0 ? 0 : dot, score);
  }
  return score;
}

TEST(IndexScores, EqualsTheScalarChainBitForBit) {
  struct Shape {
    std::int64_t rows, keys, heads, dim;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Shape s : {Shape{3, 300, 7, 24}, Shape{21, 70, 1, 5}, Shape{2, 40, 64, 128}}) {
      for (const bool relu : {true, false}) {
        const Inputs in(dtype, s.rows, s.keys, s.heads, s.dim);
        const Array scores(DType::kF32, {s.rows, s.keys});
        for (const std::string& name : fast_implementations(in.args(scores))) {
          if (name == "cpu.amx") continue;  // has another order: scorer_amx.h
          const Pin pin(name);
          run(in.args(scores, relu));
          for (std::int64_t i = 0; i < s.rows; ++i) {
            for (std::int64_t j = 0; j < s.keys; ++j) {
              const float want = scalar_score(in, i, j, relu, name != "cpu.portable");
              ASSERT_EQ(scores.as<float>()[i * s.keys + j], want) << name << " " << i << " " << j;
            }
          }
        }
      }
    }
  }
}

TEST(IndexScores, ARowAloneEqualsTheRowInTheBatch) {
  for (const char* range : {"causal", "packed", "awkward"}) {
    const Inputs in(DType::kBF16, 90, 200, 5, 40, range);
    const Array batch(DType::kF32, {90, 200}), alone(DType::kF32, {90, 200});
    for (const std::string& name : fast_implementations(in.args(batch))) {
      const Pin pin(name);
      run(in.args(batch));
      for (std::int64_t i = 0; i < 90; ++i) {
        IndexScoresArgs args = in.args(alone.view().rows(i, 1));
        args.index_query = args.index_query.rows(i, 1);
        args.index_weights = args.index_weights.rows(i, 1);
        args.starts = args.starts.rows(i, 1);
        args.ends = args.ends.rows(i, 1);
        run(args);
      }
      EXPECT_EQ(std::memcmp(batch.view().data, alone.view().data,
                            static_cast<std::size_t>(batch.bytes())),
                0)
          << name << " " << range;
    }
  }
}

// Rows are scored in chunks as in one call: a row's range does not follow its place.
TEST(IndexScores, ChunksOfRowsEqualOneCall) {
  const Inputs in(DType::kF32, 16, 16, 16, 8, "causal");
  const Array whole(DType::kF32, {16, 16}), chunked(DType::kF32, {16, 16});
  run(in.args(whole));
  for (std::int64_t first = 0; first < 16; first += 4) {
    IndexScoresArgs args = in.args(chunked.view().rows(first, 4));
    args.index_query = args.index_query.rows(first, 4);
    args.index_weights = args.index_weights.rows(first, 4);
    args.starts = args.starts.rows(first, 4);
    args.ends = args.ends.rows(first, 4);
    run(args);
  }
  EXPECT_EQ(
      std::memcmp(whole.view().data, chunked.view().data, static_cast<std::size_t>(whole.bytes())),
      0);
  EXPECT_NE(chunked.as<float>()[12 * 16 + 12], 0);  // row 12 sees 13 keys
}

TEST(IndexScores, NanStaysInItsOwnKey) {
  const Inputs in(DType::kF32, 5, 100, 4, 16);
  in.key.as<float>()[33 * 16 + 1] = std::numeric_limits<float>::quiet_NaN();
  const Array scores(DType::kF32, {5, 100});
  for (const std::string& name : fast_implementations(in.args(scores))) {
    const Pin pin(name);
    run(in.args(scores));
    for (std::int64_t n = 0; n < 500; ++n)
      EXPECT_EQ(std::isnan(scores.as<float>()[n]), n % 100 == 33) << name << " " << n;
  }
}

TEST(IndexScores, StridedInputsEqualContiguousOnes) {
  const Inputs in(DType::kF32, 4, 50, 6, 8);
  const Array query(DType::kF32, {4, 6, 20}), key(DType::kF32, {50, 20}),
      weights(DType::kF32, {6, 4}), wide(DType::kF32, {4, 70}), plain(DType::kF32, {4, 50});
  run(in.args(plain));
  IndexScoresArgs args = in.args(wide.view().channels(3, 50));
  args.index_query = query.view().channels(5, 8);
  args.index_key = key.view().channels(7, 8);
  args.index_weights = weights.view().transposed();
  for (std::int64_t i = 0; i < 24; ++i)
    for (std::int64_t d = 0; d < 8; ++d)
      query.as<float>()[i * 20 + 5 + d] = in.query.as<float>()[i * 8 + d];
  for (std::int64_t j = 0; j < 50; ++j)
    for (std::int64_t d = 0; d < 8; ++d)
      key.as<float>()[j * 20 + 7 + d] = in.key.as<float>()[j * 8 + d];
  for (std::int64_t i = 0; i < 4; ++i)
    for (std::int64_t h = 0; h < 6; ++h)
      weights.as<float>()[h * 4 + i] = in.weights.as<float>()[i * 6 + h];
  run(args);
  EXPECT_EQ(last_implementation("index_scores"), fast_implementations(in.args(plain)).front());
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 70; ++j) {
      const float want = j >= 3 && j < 53 ? plain.as<float>()[i * 50 + j - 3] : 0;
      EXPECT_EQ(bits(wide.as<float>()[i * 70 + j]), bits(want)) << i << " " << j;
    }
  }
}

// Keys, queries and scores of rows more than 2^31 elements apart, in memory that exists only where
// it is touched.
TEST(IndexScores, OffsetsBeyond32Bits) {
  constexpr std::int64_t kStride = (1ll << 31) + 4096;
  const std::size_t bytes = static_cast<std::size_t>(kStride + 64) * sizeof(float);
  std::vector<float*> memory;
  for (int m = 0; m < 3; ++m) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    memory.push_back(static_cast<float*>(p));
  }
  const Inputs in(DType::kF32, 2, 2, 1, 8);
  const Array plain(DType::kF32, {2, 2});
  run(in.args(plain));
  IndexScoresArgs args = in.args(make_tensor(memory[0], DType::kF32, {2, 2}));
  args.index_scores.strides[0] = kStride;
  args.index_query.data = memory[1];
  args.index_query.strides[0] = kStride;
  args.index_key.data.data = memory[2];
  args.index_key.data.strides[0] = kStride;
  for (std::int64_t i = 0; i < 2; ++i) {
    std::memcpy(memory[1] + i * kStride, in.query.as<float>() + i * 8, 32);
    std::memcpy(memory[2] + i * kStride, in.key.as<float>() + i * 8, 32);
  }
  run(args);
  for (std::int64_t i = 0; i < 2; ++i)
    for (std::int64_t j = 0; j < 2; ++j)
      EXPECT_EQ(memory[0][i * kStride + j], plain.as<float>()[i * 2 + j]);
  for (float* p : memory) munmap(p, bytes);
}

// Row 65537 of a matrix 65536 wide: its offset is beyond 2^32.
TEST(IndexScores, AMatrixOfMoreThanTwoToThe32Elements) {
  constexpr std::int64_t kRows = 65538, kWidth = 65536;
  const auto bytes = static_cast<std::size_t>(kRows * kWidth * 4);
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  const Inputs in(DType::kF32, kRows, 300, 1, 1), last(DType::kF32, 1, 300, 1, 1);
  std::memset(in.ends.view().data, 0, kRows * 4);
  in.ends.as<std::int32_t>()[kRows - 1] = 300;
  last.query.as<float>()[0] = in.query.as<float>()[kRows - 1];
  last.weights.as<float>()[0] = in.weights.as<float>()[kRows - 1];
  std::memcpy(last.key.view().data, in.key.view().data, 1200);
  const Array want(DType::kF32, {1, 300});
  const IndexScoresArgs args = in.args(make_tensor(p, DType::kF32, {kRows, kWidth}));
  for (const std::string& name : fast_implementations(args)) {
    const Pin pin(name);
    run(last.args(want));
    run(args);
    EXPECT_EQ(std::memcmp(static_cast<float*>(p) + (kRows - 1) * kWidth, want.view().data, 1200), 0)
        << name;
  }
  munmap(p, bytes);
}

TEST(IndexScores, ErrorsComeBeforeAnyWrite) {
  const Inputs in(DType::kF32, 2, 3, 4, 8);
  const Array scores(DType::kF32, {2, 3});
  auto message = [&](auto&& change) {
    IndexScoresArgs args = in.args(scores);
    change(args);
    try {
      Scratch scratch;
      index_scores(args, scratch.get(1 << 22));
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message([](IndexScoresArgs& a) { a.index_key.data.dtype = DType::kBF16; }),
            "[index_scores] index_key must be of dtype f32, got bf16");
  EXPECT_EQ(message([](IndexScoresArgs& a) { a.index_scores.dtype = DType::kBF16; }),
            "[index_scores] index_scores must be of dtype f32, got bf16");
  EXPECT_EQ(message([](IndexScoresArgs& a) { a.index_key.data.shape[1] = 7; }),
            "[index_scores] index_key must be [keys, index_dim] = [any, 8], got f32 [3, 7]");
  EXPECT_EQ(message([](IndexScoresArgs& a) { a.index_weights.shape[1] = 3; }),
            "[index_scores] index_weights must be [rows, index_heads] = [2, 4], got f32 [2, 3]");
  EXPECT_EQ(message([](IndexScoresArgs& a) { a.index_scores.data = a.index_key.data.data; }),
            "[index_scores] index_scores must not share memory with index_key, but they overlap");
  for (std::int64_t n = 0; n < 6; ++n) EXPECT_EQ(scores.as<float>()[n], 0);
}

}  // namespace
}  // namespace winnow
