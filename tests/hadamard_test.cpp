// hadamard: its order of channels, its own inverse, in place; scores do not notice it.
#include "winnow/hadamard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "bench/data.h"
#include "tests/each.h"
#include "winnow/index_scores.h"

namespace winnow::testing {
namespace {

template <class Args>
void run(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
         const Args& args) {
  Scratch scratch;
  operation(args, scratch.get(bytes(args)));
}
void run(const HadamardArgs& args) { run(hadamard, hadamard_workspace_bytes, args); }

// Row 1 of the Sylvester matrix alternates, row 2 alternates in pairs.
TEST(Hadamard, NaturalOrder) {
  const Array x(DType::kF32, {3, 16}), y(DType::kF32, {3, 16});
  x.as<float>()[1] = 4;
  x.as<float>()[16 + 2] = 4;
  x.as<float>()[32 + 11] = 4;  // 1011: bits 0, 1 and 3
  for_each_implementation(HadamardArgs{x, y}, [&](const std::string&) {
    run({x, y});
    for (int j = 0; j < 16; ++j) {
      EXPECT_EQ(y.as<float>()[j], j % 2 == 0 ? 1 : -1);
      EXPECT_EQ(y.as<float>()[16 + j], j / 2 % 2 == 0 ? 1 : -1);
      EXPECT_EQ(y.as<float>()[32 + j], (j + j / 2 + j / 8) % 2 == 0 ? 1 : -1);
    }
  });
}

TEST(Hadamard, InPlaceEqualsOutOfPlaceBitForBit) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Array x(dtype, {70, 2, 128}), y(dtype, {70, 2, 128});
    bench::Random random(2);
    bench::fill_gauss(x, random);
    for_each_implementation(HadamardArgs{x, y}, [&](const std::string&) {
      run({x, y});
      const Array z = x.clone();
      run({z, z});
      EXPECT_EQ(std::memcmp(y.view().data, z.view().data, static_cast<std::size_t>(y.bytes())), 0);
    });
  }
}

TEST(Hadamard, NanStaysInItsRow) {
  const Array x(DType::kF32, {3, 32}), y(DType::kF32, {3, 32});
  x.as<float>()[40] = NAN;
  for_each_implementation(HadamardArgs{x, y}, [&](const std::string&) {
    run({x, y});
    for (int n = 0; n < 96; ++n) EXPECT_EQ(std::isnan(y.as<float>()[n]), n / 32 == 1);
  });
}

// H5: built in, any power of two, else an error; f32 scores equal to 1e-5 with and without it.
TEST(Hadamard, H5ScoresDoNotNoticeTheRotation) {
  constexpr std::int64_t kRows = 4, kKeys = 50, kHeads = 8;
  for (const std::int64_t dim : {1, 2, 16, 64, 128, 256}) {
    const Array query(DType::kF32, {kRows, kHeads, dim}), key(DType::kF32, {kKeys, dim}),
        weights(DType::kF32, {kRows, kHeads}), starts(DType::kI32, {kRows}),
        ends(DType::kI32, {kRows}), plain(DType::kF32, {kRows, kKeys}),
        rotated(DType::kF32, {kRows, kKeys});
    bench::Random random(4);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random, 1 / std::sqrt(static_cast<double>(kHeads * dim)));
    bench::fill_ranges("full", kKeys, 1, starts, ends, random);
    IndexScoresArgs args = {query, key, weights, starts, ends, true, plain};
    run(index_scores, index_scores_workspace_bytes, args);
    run({query, query});
    run({key, key});
    args.index_scores = rotated;
    run(index_scores, index_scores_workspace_bytes, args);
    for (std::int64_t n = 0; n < kRows * kKeys; ++n)
      EXPECT_NEAR(at(rotated, n), at(plain, n), 1e-5) << dim << " " << n;
  }
}

TEST(Hadamard, Refusals) {
  const Array odd(DType::kF32, {2, 96}), x(DType::kF32, {2, 64}), none(DType::kF32, {2, 0});
  const auto message = [](const HadamardArgs& a) { return error_of([&] { run(a); }); };
  EXPECT_EQ(message({odd, odd}),
            "[hadamard] the last axis of input must be a power of two, got 96");
  EXPECT_EQ(message({none, none}),
            "[hadamard] the last axis of input must be a power of two, got 0");
  EXPECT_EQ(message({x, odd}),
            "[hadamard] output must have the shape of input, f32 [2, 64], got f32 "
            "[2, 96]");
  const Array wide(DType::kF64, {2, 64});
  EXPECT_EQ(message({x, wide}), "[hadamard] output can be f64 only where input is, got f32");
  const Tensor shifted = make_tensor(x.as<float>() + 1, DType::kF32, {1, 64});
  EXPECT_EQ(message({x.view().rows(0, 1), shifted}),
            "[hadamard] output must not share memory with input, but they overlap");
}

}  // namespace
}  // namespace winnow::testing
