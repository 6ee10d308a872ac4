// The floor under everything: numbers, tensors, errors, parallel loops, the problem grammar.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/array.h"
#include "base/check.h"
#include "base/numbers.h"
#include "base/parallel.h"
#include "base/text.h"
#include "bench/case.h"
#include "bench/data.h"

namespace winnow {
namespace {

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// Every bit pattern of a 16-bit type comes back from float, NaN as a quiet NaN of its sign.
template <class T, class Convert>
void expect_round_trips(Convert&& to_narrow, std::uint16_t quiet_bit) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T narrow{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(narrow);
    const T back = to_narrow(wide);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(back))) << bits;
      EXPECT_EQ(back.bits & 0x8000, bits & 0x8000) << bits;
      EXPECT_NE(back.bits & quiet_bit, 0) << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

TEST(Numbers, EveryBf16ComesBack) { expect_round_trips<BF16>(to_bf16, 0x40); }
TEST(Numbers, EveryF16ComesBack) { expect_round_trips<F16>(to_f16, 0x200); }

// Between two neighbours: below the middle down, above it up, in the middle to the even one.
// Subnormals, the step to the next exponent and overflow to infinity included.
template <class T, class Convert>
void expect_nearest_even(Convert&& to_narrow, std::uint16_t infinity, double first_too_large) {
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const T low{bits}, high{static_cast<std::uint16_t>(bits + 1)};
    const double a = to_float(low);
    const double b = high.bits == infinity ? first_too_large : to_float(high);
    const auto middle = static_cast<float>((a + b) / 2);
    if (static_cast<double>(middle) != (a + b) / 2) continue;  // float is too narrow for the middle
    for (const float sign : {1.f, -1.f}) {
      const std::uint16_t s = sign < 0 ? 0x8000 : 0;
      const std::uint16_t even = (bits & 1) == 0 ? low.bits : high.bits;
      ASSERT_EQ(to_narrow(sign * middle).bits, even | s) << bits;
      ASSERT_EQ(to_narrow(sign * std::nextafter(middle, 0.f)).bits, low.bits | s) << bits;
      ASSERT_EQ(to_narrow(sign * std::nextafter(middle, INFINITY)).bits, high.bits | s) << bits;
    }
  }
}

TEST(Numbers, Bf16RoundsToNearestEven) { expect_nearest_even<BF16>(to_bf16, 0x7f80, 0x1p128); }
TEST(Numbers, F16RoundsToNearestEven) { expect_nearest_even<F16>(to_f16, 0x7c00, 65536); }

TEST(Numbers, LargestFloatsOverflowToInfinity) {
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7f7fffffu)).bits, 0x7f80);
  EXPECT_EQ(to_f16(1e30f).bits, 0x7c00);
  EXPECT_EQ(to_f16(-INFINITY).bits, 0xfc00);
  EXPECT_EQ(to_f16(1e-30f).bits, 0);
  EXPECT_EQ(to_f16(-1e-30f).bits, 0x8000);
}

TEST(Tensors, ViewsShareMemory) {
  std::vector<float> data(24);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  const Tensor t = make_tensor(data.data(), DType::kF32, {4, 6});
  EXPECT_EQ(t.elements(), 24);
  EXPECT_TRUE(t.contiguous());
  EXPECT_EQ(*t.rows(2, 1).as<float>(), 12);
  EXPECT_EQ(*t.channels(3, 2).as<float>(), 3);
  EXPECT_FALSE(t.channels(3, 2).contiguous());
  EXPECT_TRUE(t.rows(1, 3).contiguous());
  const Tensor flipped = t.transposed();
  EXPECT_EQ(flipped.shape[0], 6);
  EXPECT_EQ(flipped.strides[0], 1);
  EXPECT_EQ(t.reshape({2, 3, 4}).strides[0], 12);
  EXPECT_THROW(t.rows(3, 2), Error);
  EXPECT_THROW(t.channels(-1, 2), Error);
  EXPECT_THROW(flipped.reshape({24}), Error);
  EXPECT_THROW(t.reshape({5, 5}), Error);
  EXPECT_EQ(Tensor().elements(), 0);
}

TEST(Tensors, ArraysAreZeroedAlignedAndCloned) {
  Array a(DType::kF32, {3, 5});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.view().data) % 64, 0u);
  for (int i = 0; i < 15; ++i) EXPECT_EQ(a.as<float>()[i], 0);
  a.as<float>()[7] = 4;
  const Array b = a.clone();
  a.zero();
  EXPECT_EQ(a.as<float>()[7], 0);
  EXPECT_EQ(b.as<float>()[7], 4);
  EXPECT_TRUE(Array().empty());
  EXPECT_EQ(Array(DType::kF64, {0, 3}).bytes(), 0);
}

TEST(Errors, NameOperationRuleAndValue) {
  float x[6] = {};
  const Tensor t = make_tensor(x, DType::kF32, {2, 3});
  EXPECT_EQ(message_of([&] {
              check_shape("op", "query", t, {2, -1, 4}, "[rows, heads, dim]");
            }),
            "[op] query must be [rows, heads, dim] = [2, any, 4], got f32 [2, 3]");
  EXPECT_EQ(message_of([&] {
              check_dtype("op", "query", t, {DType::kBF16, DType::kF16});
            }),
            "[op] query must be of dtype bf16, f16, got f32");
  EXPECT_EQ(message_of([&] { check_unit_stride("op", "query", t.transposed()); }),
            "[op] query must have stride 1 on its last axis, got 3");
  EXPECT_EQ(message_of([&] { check_no_overlap("op", "out", t.rows(1, 1), "query", t); }),
            "[op] out must not share memory with query, but they overlap");
  EXPECT_EQ(message_of([&] { check_no_overlap("op", "out", t.rows(1, 1), "query", t.rows(0, 1)); }),
            "no error");
  EXPECT_EQ(message_of([&] { check_shape("op", "value", {}, {2}, "[rows]"); }),
            "[op] value must be [rows] = [2], got nothing");
}

// Codes and scales side by side in rows of a cache share nothing; and of random views none passes
// that has a byte in common with another.
TEST(Errors, InterleavedViewsDoNotOverlap) {
  std::vector<unsigned char> memory(4096);
  const auto overlap = [](const Tensor& a, const Tensor& b) {
    return message_of([&] { check_no_overlap("op", "a", a, "b", b); }) != "no error";
  };
  Tensor codes = make_tensor(memory.data(), DType::kE4M3, {3, 7, 128}),
         scales = make_tensor(memory.data() + 128, DType::kE8M0, {3, 7, 4});
  codes.strides = {7 * 132, 132, 1};
  scales.strides = codes.strides;
  EXPECT_FALSE(overlap(codes, scales));
  EXPECT_FALSE(overlap(scales, codes));
  scales.shape[2] = 5;  // into the next row
  EXPECT_TRUE(overlap(codes, scales));
  scales.data = memory.data() + 127;
  scales.shape[2] = 4;
  EXPECT_TRUE(overlap(codes, scales));

  bench::Random random(3);
  int apart = 0, accepted = 0;
  for (int n = 0; n < 20000; ++n) {
    std::vector<int> owners(4096, 0);
    Tensor views[2];
    bool shared = false;
    for (Tensor& t : views) {
      const DType dtypes[] = {DType::kU8, DType::kF32, DType::kBF16};
      t = make_tensor(memory.data() + 1024 + 4 * random.below(20), dtypes[random.below(3)],
                      {1 + random.below(4), 1 + random.below(3), 1 + random.below(5)});
      t.strides = {random.below(20) - 4, random.below(20) - 4, random.below(3)};
      if (random.below(2) == 0) t.strides[2] = 1;
      std::vector<bool> mine(4096, false);
      for (std::int64_t i = 0; i < t.elements(); ++i) {
        const std::int64_t at = i / (t.shape[1] * t.shape[2]) * t.strides[0] +
                                i / t.shape[2] % t.shape[1] * t.strides[1] +
                                i % t.shape[2] * t.strides[2];
        for (std::int64_t b = 0; b < dtype_bytes(t.dtype); ++b)
          mine[static_cast<std::size_t>(t.as<unsigned char>() - memory.data() +
                                        at * dtype_bytes(t.dtype) + b)] = true;
      }
      for (std::size_t b = 0; b < 4096; ++b) shared |= mine[b] && ++owners[b] > 1;
    }
    const bool refused = overlap(views[0], views[1]);
    ASSERT_TRUE(refused || !shared) << n;
    apart += shared ? 0 : 1;
    accepted += refused ? 0 : 1;
  }
  EXPECT_GT(accepted, apart / 4);
}

TEST(Text, NearestName) {
  EXPECT_EQ(nearest_name("index_scors", {"index_topk", "index_scores", "select_topk"}),
            "index_scores");
  EXPECT_EQ(nearest_name("x", {}), "");
}

struct Threads : testing::TestWithParam<int> {
  int before = num_threads();
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(before); }
};

TEST_P(Threads, EveryTaskRunsOnce) {
  for (std::int64_t tasks : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
    std::atomic<int> bad_workers{0};
    parallel_for(tasks, [&](std::int64_t task, int worker) {
      ++runs[static_cast<std::size_t>(task)];
      if (worker < 0 || worker >= num_threads()) ++bad_workers;
    });
    for (const std::atomic<int>& n : runs) EXPECT_EQ(n, 1);
    EXPECT_EQ(bad_workers, 0);
  }
}

TEST_P(Threads, WorkersNameScratchThatNobodyElseUses) {
  std::vector<std::atomic<int>> inside(static_cast<std::size_t>(num_threads()));
  std::atomic<int> clashes{0};
  parallel_for(500, [&](std::int64_t, int worker) {
    if (inside[static_cast<std::size_t>(worker)].fetch_add(1) != 0) ++clashes;
    std::this_thread::yield();
    --inside[static_cast<std::size_t>(worker)];
  });
  EXPECT_EQ(clashes, 0);
}

TEST_P(Threads, WorkersAreNoMoreThanTasks) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    parallel_for(2, [](std::int64_t, int worker) { EXPECT_LT(worker, 2); });
  }
}

TEST_P(Threads, AnExceptionReachesTheCallerAndTheNextLoopRuns) {
  EXPECT_THROW(parallel_for(100,
                            [](std::int64_t task, int) {
                              if (task == 37) throw std::runtime_error("task 37");
                            }),
               std::runtime_error);
  std::atomic<int> runs{0};
  parallel_for(100, [&](std::int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 100);
}

TEST_P(Threads, NestedLoopsRunSerially) {
  std::atomic<int> runs{0}, other_threads{0};
  parallel_for(8, [&](std::int64_t, int) {
    const std::thread::id outer = std::this_thread::get_id();
    parallel_for(10, [&](std::int64_t, int worker) {
      ++runs;
      if (std::this_thread::get_id() != outer || worker != 0) ++other_threads;
    });
  });
  EXPECT_EQ(runs, 80);
  EXPECT_EQ(other_threads, 0);
}

INSTANTIATE_TEST_SUITE_P(Counts, Threads, testing::Values(1, 2, 3, 8));

TEST(Threads, CallersOnSeveralThreadsTakeTurns) {
  std::atomic<int> runs{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) parallel_for(16, [&](std::int64_t, int) { ++runs; });
    });
  }
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(runs, 4 * 20 * 16);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space
[[noreturn]] void ask_for_too_many_threads() {
  alarm(20);
  rlimit space{};
  space.rlim_cur = space.rlim_max = rlim_t{1} << 30;  // a thread's stack takes 8 MiB
  setrlimit(RLIMIT_AS, &space);
  set_num_threads(1024);
  std::fputs(message_of([] { parallel_for(2, [](std::int64_t, int) {}); }).c_str(), stderr);
  set_num_threads(2);
  std::atomic<int> runs{0};
  parallel_for(9, [&](std::int64_t, int) { ++runs; });
  std::_Exit(runs == 9 ? 0 : 1);
}
TEST(Threads, MoreThanTheSystemStartsAreAnErrorAndNoHang) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";  // a fork alone would inherit no pool
  EXPECT_EXIT(ask_for_too_many_threads(), testing::ExitedWithCode(0),
              "must start 1024 threads, but starts");
}
#endif

TEST(Threads, CountsOutsideTheRangeAreRefused) {
  EXPECT_EQ(message_of([] { set_num_threads(0); }),
            "[threads] threads must be from 1 to 1024, got 0");
  EXPECT_THROW(set_num_threads(100'000), Error);
}

using bench::Problem;

TEST(Problems, WhatIsLeftOutTakesItsDefault) {
  const Problem p = Problem::parse("index_scores rows=7 dtype=bf16");
  EXPECT_EQ(p.operation(), "index_scores");
  EXPECT_EQ(p.number("rows"), 7);
  EXPECT_EQ(p.number("index_dim"), 128);
  EXPECT_EQ(p.dtype(), DType::kBF16);
  EXPECT_TRUE(p.flag("relu"));
  EXPECT_EQ(p.text(), "index_scores rows=7 dtype=bf16");
}

TEST(Problems, MistakesAreNamedWithTheNearestValidName) {
  auto parse = [](const char* text) { return message_of([&] { Problem::parse(text); }); };
  EXPECT_EQ(parse("index_score"),
            "[problem] there is no operation \"index_score\"; did you mean \"index_scores\"?");
  EXPECT_EQ(parse("index_scores rws=3"),
            "[problem] index_scores has no parameter \"rws\"; did you mean \"rows\"?");
  EXPECT_EQ(parse("index_scores rows"),
            "[problem] every word after the operation must read name=value, got \"rows\"");
  EXPECT_EQ(parse("index_scores rows="),
            "[problem] every word after the operation must read name=value, got \"rows=\"");
  EXPECT_EQ(parse("index_scores rows=3x"),
            "[problem] rows must be a whole number from 0 to 2147483648, got \"3x\"");
  EXPECT_EQ(parse("index_scores rows=99999999999"),
            "[problem] rows must be a whole number from 0 to 2147483648, got \"99999999999\"");
  EXPECT_EQ(parse("index_scores specials=7"),
            "[problem] specials must be a whole number from 0 to 1, got \"7\"");
  EXPECT_EQ(parse("select_topk step=0"),
            "[problem] step must be a whole number from 1 to 2147483648, got \"0\"");
  EXPECT_EQ(parse("index_scores dtype=f8"),
            "[problem] dtype must be f64, f32, bf16, f16, e4m3 or mxfp8, got \"f8\"");
  EXPECT_EQ(parse("sparse_attention dtype=e4m3"),
            "[problem] dtype must be f64, f32, bf16 or f16, got \"e4m3\"");
  EXPECT_EQ(parse("select_topk data=zeroes"),
            "[problem] data must be gauss, ties, zeros, equal, ascending, descending, special, "
            "invalid, few, near, low, hidden or bits, got \"zeroes\"");
}

// Where no name is near, all are named.
TEST(Problems, AWordFarFromAllNamesIsAnsweredWithAll) {
  EXPECT_EQ(message_of([] { Problem::parse("dequantise format=x"); }),
            "[problem] dequantise has no parameter \"format\"; there are rows, heads, dim, groups, "
            "scale and seed");
  EXPECT_EQ(name_hint("flibble", {"matmul", "pool_keys"}), "there are matmul and pool_keys");
  EXPECT_EQ(name_hint("matmull", {"matmul", "pool_keys"}), "did you mean \"matmul\"?");
  EXPECT_EQ(name_hint("x", {}), "");
}

TEST(Problems, SizesThatNoMemoryHoldsAreRefused) {
  auto check = [](const char* text) { return message_of([&] { bench::check_problem(text); }); };
  EXPECT_EQ(check("index_scores rows=-3"),
            "[problem] rows must be a whole number from 0 to 2147483648, got \"-3\"");
  EXPECT_EQ(
      check("index_scores rows=2000000000 index_heads=2000000000"),
      "[problem] a tensor must have at most 2^56 elements, got 2000000000, 2000000000 by 128");
  EXPECT_EQ(check("index_scores rows=0 index_heads=2000000000 index_dim=2000000000"),
            "[problem] a tensor must have at most 2^56 elements, got 0, 2000000000 by 2000000000")
      << "an axis of none hides no size";
}

TEST(Problems, WordsOfACommandLineBecomeProblems) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(bench::split_problems({"a x=1 y=2", "b"}), (Texts{"a x=1 y=2", "b"}));
  EXPECT_EQ(bench::split_problems({"a", "x=1", "y=2", "b", "z=3"}), (Texts{"a x=1 y=2", "b z=3"}));
  EXPECT_EQ(bench::split_problems({"index_topk rows", "keys=2", "rows=3"}),
            (Texts{"index_topk rows keys=2 rows=3"}))
      << "a value that was forgotten begins no problem";
  EXPECT_EQ(bench::split_problems({}), Texts{});
  EXPECT_EQ(message_of([] { bench::split_problems({" "}); }),
            "[problem] a problem must begin with an operation, got \" \"");
}

}  // namespace
}  // namespace winnow
