// pool_keys against a softmax in double written from its contract, and its edges.
#include "winnow/pool_keys.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/array.h"
#include "bench/case.h"
#include "bench/data.h"
#include "tests/each.h"
#include "winnow/pools.h"

namespace winnow::testing {
namespace {

struct Inputs {
  Array key, gate, ape, bases;
  Inputs(DType dtype, std::int64_t keys, std::int64_t dim, std::int64_t pool_size,
         const std::vector<std::int32_t>& first)
      : key(dtype, {keys, dim}),
        gate(dtype, {keys, dim}),
        ape(DType::kF32, {pool_size, dim}),
        bases(DType::kI32, {static_cast<std::int64_t>(first.size())}) {
    bench::Random random(5);
    bench::fill_gauss(key, random);
    bench::fill_gauss(gate, random, 2);
    bench::fill_gauss(ape, random);
    std::copy(first.begin(), first.end(), bases.as<std::int32_t>());
  }
  PoolKeysArgs args(const Tensor& pooled, PoolRounding rounding = PoolRounding::kOnce) const {
    return {key, gate, ape, bases, rounding, pooled};
  }
};

void run(const PoolKeysArgs& args) {
  Scratch scratch;
  pool_keys(args, scratch.get(pool_keys_workspace_bytes(args)));
}

bool same_bytes(const Array& a, const Array& b) {
  return a.bytes() == b.bytes() &&
         std::memcmp(a.view().data, b.view().data, static_cast<std::size_t>(a.bytes())) == 0;
}

// By hand: gates ln 1, ln 3 with no ape weigh 1/4 and 3/4; an ape of ln 3 on the first token evens
// them out.
TEST(PoolKeys, WeighsByGateAndPlace) {
  const double ln3 = std::log(3.0);
  const Array key = floats(DType::kF32, {2, 2}, {8, 8, 16, 16});
  const Array gate = floats(DType::kF32, {2, 2}, {0, 0, ln3, ln3});
  const Array ape = floats(DType::kF32, {2, 2}, {0, ln3, 0, 0});
  const Array bases = ints({1}, {0}), pooled(DType::kF32, {1, 2});
  for_each_implementation(PoolKeysArgs{key, gate, ape, bases, PoolRounding::kOnce, pooled},
                          [&](const std::string&) {
                            run({key, gate, ape, bases, PoolRounding::kOnce, pooled});
                            EXPECT_NEAR(at(pooled, 0), 14, 1e-5);
                            EXPECT_NEAR(at(pooled, 1), 12, 1e-5);
                          });
}

// Three equal weights and keys of 7 give 7. In bf16 a third is 171/512, times 7 is 2.3379, which
// rounds to 2.34375, and three of them are 7.03125.
TEST(PoolKeys, RoundingIsAChoice) {
  const Array gate(DType::kBF16, {3, 1}), ape(DType::kF32, {3, 1}), pooled(DType::kBF16, {1, 1});
  const Array key = floats(DType::kBF16, {3, 1}, {7, 7, 7}), bases = ints({1}, {0});
  PoolKeysArgs args{key, gate, ape, bases, PoolRounding::kOnce, pooled};
  for_each_implementation(args, [&](const std::string&) {
    args.rounding = PoolRounding::kOnce;
    run(args);
    EXPECT_EQ(at(pooled, 0), 7);
    args.rounding = PoolRounding::kKeyDtype;
    run(args);
    EXPECT_EQ(at(pooled, 0), 7.03125);
  });
}

TEST(PoolKeys, AnAbsentPoolIsZerosAndReadsNothing) {
  constexpr std::int32_t kMin = std::numeric_limits<std::int32_t>::min(),
                         kMax = std::numeric_limits<std::int32_t>::max();
  const Inputs in(DType::kF32, 10, 5, 4, {0, -1, 6, 7, 10, -4, kMin, kMax});
  const Array pooled(DType::kF32, {8, 5});
  for_each_implementation(in.args(pooled), [&](const std::string&) {
    bench::poison(pooled);
    run(in.args(pooled));
    for (std::int64_t n = 0; n < 40; ++n) {
      const bool whole = n / 5 == 0 || n / 5 == 2;  // the pools [0, 4) and [6, 10)
      EXPECT_EQ(at(pooled, n) == 0, !whole) << n;
      EXPECT_FALSE(bench::is_poison(pooled, n)) << n;
    }
  });
}

TEST(PoolKeys, NanStaysInItsChannel) {
  for (const double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    const Inputs in(DType::kF32, 8, 20, 4, {0, 4});
    in.gate.as<float>()[2 * 20 + 13] = static_cast<float>(bad);
    const Array pooled(DType::kF32, {2, 20});
    for_each_implementation(in.args(pooled), [&](const std::string&) {
      run(in.args(pooled));
      for (std::int64_t n = 0; n < 40; ++n) EXPECT_EQ(std::isnan(at(pooled, n)), n == 13) << n;
    });
  }
  // A gate of -inf gives its token no weight; all of them give no answer.
  const Inputs in(DType::kF32, 2, 2, 2, {0});
  in.gate.as<float>()[0] = in.gate.as<float>()[1] = in.gate.as<float>()[3] = -INFINITY;
  const Array pooled(DType::kF32, {1, 2});
  for_each_implementation(in.args(pooled), [&](const std::string&) {
    run(in.args(pooled));
    EXPECT_EQ(at(pooled, 0), at(in.key, 2));
    EXPECT_TRUE(std::isnan(at(pooled, 1)));
  });
}

// One token a pool: its key, whatever its gate.
TEST(PoolKeys, PoolsOfOneAreTheKeys) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    Inputs in(dtype, 5, 11, 1, {0, 1, 2, 3, 4});
    if (dtype == DType::kF64) in.ape = Array(dtype, {1, 11});
    const Array pooled(dtype, {5, 11});
    for (const PoolRounding rounding : {PoolRounding::kOnce, PoolRounding::kKeyDtype}) {
      for_each_implementation(in.args(pooled, rounding), [&](const std::string&) {
        run(in.args(pooled, rounding));
        EXPECT_TRUE(same_bytes(pooled, in.key));
      });
    }
  }
}

// A pool's bits do not depend on its neighbours, its place in the tensor, or where a channel stands
// among eight.
TEST(PoolKeys, APoolAloneEqualsThePoolInTheBatch) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const std::int64_t pool_size : {2, 4, 5, 16}) {
      const std::int64_t keys = 300, dim = 21;
      const Inputs in(dtype, keys, dim, pool_size,
                      pool_layout(packed_spans(std::vector{0, 103, 300}), pool_size).bases);
      const std::int64_t pools = in.bases.elements();
      const Array batch(dtype, {pools, dim}), alone(dtype, {pools, dim});
      for (const PoolRounding rounding : {PoolRounding::kOnce, PoolRounding::kKeyDtype}) {
        for_each_implementation(in.args(batch, rounding), [&](const std::string&) {
          run(in.args(batch, rounding));
          for (std::int64_t m = 0; m < pools; ++m) {
            for (std::int64_t d = 0; d < dim; ++d) {
              PoolKeysArgs args = in.args(alone.view().rows(m, 1).channels(d, 1), rounding);
              const std::int32_t base = in.bases.as<std::int32_t>()[m];
              args.index_key = args.index_key.rows(base, pool_size).channels(d, 1);
              args.gate = args.gate.rows(base, pool_size).channels(d, 1);
              args.ape = args.ape.channels(d, 1);
              const Array zero = ints({1}, {0});
              args.pool_bases = zero;
              run(args);
            }
          }
          EXPECT_TRUE(same_bytes(batch, alone));
        });
      }
    }
  }
}

TEST(PoolKeys, StridedInputsEqualContiguousOnes) {
  const Inputs in(DType::kF32, 12, 9, 4, {0, 4, 8});
  const Array key(DType::kF32, {12, 30}), gate(DType::kF32, {12, 30}), ape(DType::kF32, {4, 30}),
      plain(DType::kF32, {3, 9}), wide(DType::kF32, {3, 30});
  for (std::int64_t n = 0; n < 12 * 9; ++n) {
    key.as<float>()[n / 9 * 30 + 7 + n % 9] = in.key.as<float>()[n];
    gate.as<float>()[n / 9 * 30 + 2 + n % 9] = in.gate.as<float>()[n];
    if (n < 36) ape.as<float>()[n / 9 * 30 + 20 + n % 9] = in.ape.as<float>()[n];
  }
  for_each_implementation(in.args(plain), [&](const std::string& name) {
    run(in.args(plain));
    PoolKeysArgs args = in.args(wide.view().channels(11, 9));
    args.index_key = key.view().channels(7, 9);
    args.gate = gate.view().channels(2, 9);
    args.ape = ape.view().channels(20, 9);
    run(args);
    EXPECT_EQ(last_implementation("pool_keys"), name);
    for (std::int64_t n = 0; n < 90; ++n) {
      const std::int64_t d = n % 30 - 11;
      EXPECT_EQ(at(wide, n), d >= 0 && d < 9 ? at(plain, n / 30 * 9 + d) : 0) << n;
    }
  });
}

// Tokens and pools more than 2^31 elements apart, in memory that exists only where it is touched.
TEST(PoolKeys, OffsetsBeyond32Bits) {
  constexpr std::int64_t kStride = (1ll << 31) + 4096, kDim = 9;
  const std::size_t bytes = static_cast<std::size_t>(kStride + 64) * sizeof(float);
  float* memory[3];
  for (float*& m : memory) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    m = static_cast<float*>(p);
  }
  const Inputs in(DType::kF32, 2, kDim, 2, {0, -1});
  const Array plain(DType::kF32, {2, kDim});
  PoolKeysArgs args = in.args(make_tensor(memory[2], DType::kF32, {2, kDim}));
  args.index_key.data = memory[0];
  args.gate.data = memory[1];
  for (Tensor* t : {&args.index_key, &args.gate, &args.pooled_key}) t->strides[0] = kStride;
  for (std::int64_t t = 0; t < 2; ++t) {
    std::memcpy(memory[0] + t * kStride, in.key.as<float>() + t * kDim, kDim * sizeof(float));
    std::memcpy(memory[1] + t * kStride, in.gate.as<float>() + t * kDim, kDim * sizeof(float));
  }
  for_each_implementation(args, [&](const std::string&) {
    run(in.args(plain));
    memory[2][kStride] = 7;  // the second pool is absent
    run(args);
    for (std::int64_t d = 0; d < kDim; ++d) {
      EXPECT_EQ(memory[2][d], plain.as<float>()[d]);
      EXPECT_EQ(memory[2][kStride + d], 0);
    }
  });
  for (float* m : memory) munmap(m, bytes);
}

TEST(PoolKeys, ErrorsNameTheRule) {
  const Inputs in(DType::kF32, 8, 3, 4, {0, 4});
  const Array pooled(DType::kF32, {2, 3});
  auto message = [&](auto&& change) {
    PoolKeysArgs args = in.args(pooled);
    change(args);
    return error_of([&] { run(args); });
  };
  EXPECT_EQ(message([](PoolKeysArgs& a) { a.gate.dtype = DType::kBF16; }),
            "[pool_keys] gate must be of dtype f32, got bf16");
  EXPECT_EQ(message([](PoolKeysArgs& a) { a.gate.shape[0] = 7; }),
            "[pool_keys] gate must be [keys, index_dim] = [8, 3], got f32 [7, 3]");
  EXPECT_EQ(message([](PoolKeysArgs& a) { a.ape.shape[0] = 0; }),
            "[pool_keys] pool_size must be at least 1, got 0");
  EXPECT_EQ(message([](PoolKeysArgs& a) { a.pooled_key.shape[0] = 3; }),
            "[pool_keys] pooled_key must be [pools, index_dim] = [2, 3], got f32 [3, 3]");
  EXPECT_EQ(message([](PoolKeysArgs& a) { a.pool_bases.dtype = DType::kI64; }),
            "[pool_keys] pool_bases must be of dtype i32, got i64");
}

}  // namespace
}  // namespace winnow::testing
