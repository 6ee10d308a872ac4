// What the shared problems of sparse_attention_backward do not show: finite differences, who
// touches which gradient, equality of dense and listed keys, invariance and the error messages.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "tests/attention_call.h"
#include "winnow/layout.h"

namespace winnow {
namespace {

// The gradients against central differences of sum(output * d_output), in f64 by the reference:
// error h^2 of the difference and 1e-16 / h of its rounding, 1e-9 with h = 1e-5.
void expect_finite_differences(AttentionCall& call) {
  call.forward();
  call.backward();
  auto loss = [&] {
    call.forward();
    double sum = 0;
    for (std::int64_t e = 0; e < call.output.elements(); ++e)
      sum += call.output.as<double>()[e] * call.d_output.as<double>()[e];
    return sum;
  };
  const std::pair<const Array*, const Array*> pairs[] = {
      {&call.query, &call.d_query}, {&call.key, &call.d_key}, {&call.value, &call.d_value}};
  for (const auto& [input, gradient] : pairs) {
    for (std::int64_t e = 0; e < input->elements(); ++e) {
      double& x = input->as<double>()[e];
      const double before = x, h = 1e-5;
      x = before + h;
      const double above = loss();
      x = before - h;
      const double below = loss();
      x = before;
      EXPECT_NEAR(gradient->as<double>()[e], (above - below) / (2 * h), 1e-7) << e;
    }
  }
}

TEST(SparseAttentionBackward, FiniteDifferences) {
  AttentionCall shared(3, 6, 2, 1, 5, 3, false, DType::kF64);
  expect_finite_differences(shared);
  AttentionCall grouped(3, 7, 4, 2, 3, 4, true, DType::kF64);
  grouped.list(5, {0, 4, 2, -1, 6, 3, 3, 9, 1, 0, -1, -1, -1, -1, -1});  // row 1: a duplicate
  grouped.see(0, 0, 6);
  grouped.lengths = Array(DType::kI32, {3});
  grouped.lengths.as<std::int32_t>()[0] = 5;
  grouped.lengths.as<std::int32_t>()[1] = 4;
  grouped.lengths.as<std::int32_t>()[2] = 5;
  expect_finite_differences(grouped);
}

// d_key lies behind a canary, and the key behind a row of +inf.
TEST(SparseAttentionBackward, AnIdOutsideTheRangeIsNeverAnAddress) {
  AttentionCall call(8, 10, 2, 1, 24, 16);
  Array inf_key(DType::kF32, {10, 1, 24}), canary(DType::kF32, {10, 1, 24});
  std::memcpy(inf_key.as<void>(), call.key.as<void>(), static_cast<std::size_t>(inf_key.bytes()));
  for (int d = 0; d < 24; ++d)
    inf_key.as<float>()[d] = inf_key.as<float>()[9 * 24 + d] =
        std::numeric_limits<float>::infinity();
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 8; ++i) {
    call.see(i, 0, i + 1);
    for (int s = 0; s < 4; ++s) ids.push_back(i - s);  // causal: the first rows have -1, -2, -3
  }
  call.list(4, ids);
  SparseAttentionBackwardArgs args = call.backward_args();
  args.key = inf_key.view().rows(1, 8);
  args.d_key = canary.view().rows(1, 8);
  with_each(explain(args), [&](const std::string& name) {
    std::memset(canary.as<void>(), 0xff, static_cast<std::size_t>(canary.bytes()));
    SparseAttentionArgs forward = call.forward_args();
    forward.key = args.key;
    AttentionCall::forward(forward);
    AttentionCall::backward(args);
    const Array untouched = canary.clone();
    for (int d = 0; d < 24; ++d) {
      EXPECT_EQ(untouched.as<std::uint32_t>()[d], 0xffffffffu) << name;
      EXPECT_EQ(untouched.as<std::uint32_t>()[9 * 24 + d], 0xffffffffu) << name;
    }
    for (int e = 24; e < 9 * 24; ++e) EXPECT_TRUE(std::isfinite(canary.as<float>()[e])) << name;
    for (int e = 0; e < call.d_query.elements(); ++e)
      EXPECT_TRUE(std::isfinite(call.d_query.as<float>()[e])) << name;
  });
}

// Half a tile of keys, logits near -120: a spare lane that counted as logit 0 would weigh e^120.
TEST(SparseAttentionBackward, SpareLanesDoNotWeigh) {
  for (const std::int64_t keys : {8, 32, 33}) {
    AttentionCall call(3, keys, 4, 1, 8, 8);
    call.scale = 1;
    for (std::int64_t e = 0; e < call.query.elements(); ++e)
      call.query.as<float>()[e] = 4 + 0.01f * static_cast<float>(e % 7);
    for (std::int64_t e = 0; e < call.key.elements(); ++e)
      call.key.as<float>()[e] = -3.75f + 0.01f * static_cast<float>(e % 5);
    Array truth;
    pin_implementation("sparse_attention_backward", "reference");
    call.forward();
    call.backward();
    pin_implementation("sparse_attention_backward", "");
    truth = call.d_key.clone();
    with_each(explain(call.backward_args()), [&](const std::string& name) {
      call.backward();
      // p carries gamma(8 + 3) * 120, some 1e-4; the gradients here are of size 1.
      for (std::int64_t e = 0; e < truth.elements(); ++e)
        EXPECT_NEAR(call.d_key.as<float>()[e], truth.as<float>()[e], 1e-3) << name;
    });
  }
}

TEST(SparseAttentionBackward, RowsGiveToTheirOwnKeysOnly) {
  AttentionCall call(2, 16, 32, 1, 8, 8);
  std::vector<std::int32_t> ids(16);
  std::iota(ids.begin(), ids.end(), 0);
  call.list(8, ids);
  call.forward();
  with_each(explain(call.backward_args()), [&](const std::string& name) {
    call.backward();
    const Array both = call.d_key.clone();
    for (const std::int64_t row : {0, 1}) {
      SparseAttentionBackwardArgs one = call.backward_args();
      for (Tensor* t : {&one.query, &one.topk_indices, &one.starts, &one.ends, &one.output,
                        &one.lse, &one.d_output, &one.d_query})
        *t = t->rows(row, 1);
      AttentionCall::backward(one);
      EXPECT_TRUE(same_bits(both.view().rows(8 * row, 8), one.d_key.rows(8 * row, 8))) << name;
      for (int e = 0; e < 64; ++e)
        EXPECT_EQ(one.d_key.rows(8 - 8 * row, 8).as<float>()[e], 0) << name;
    }
  });
}

TEST(SparseAttentionBackward, RowsWithoutSlotsGiveAndGetZero) {
  AttentionCall call(3, 5, 2, 1, 6, 6);
  call.list(2, {-1, 7, -1, -1, 2, 1});
  call.see(2, 3, 3);
  call.forward();
  with_each(explain(call.backward_args()), [&](const std::string& name) {
    bench::Random random(5);
    bench::fill_gauss(call.d_query, random);
    bench::fill_gauss(call.d_key, random);
    call.backward();
    for (int e = 0; e < 36; ++e) EXPECT_EQ(call.d_query.as<float>()[e], 0) << name;
    for (int e = 0; e < 30; ++e) EXPECT_EQ(call.d_key.as<float>()[e], 0) << name;
  });
}

// NaN in the query of one row stays with that row and the keys it sees, tiles or not.
TEST(SparseAttentionBackward, NaNStaysWithTheKeysOfItsRow) {
  AttentionCall call(6, 40, 4, 1, 16, 16);
  for (int i = 0; i < 6; ++i) call.see(i, 0, 20 + 3 * i);
  call.query.as<float>()[5 * 64] = std::nanf("");  // row 5 sees keys 0..34
  call.see(5, 0, 10);
  call.forward();
  with_each(explain(call.backward_args()), [&](const std::string& name) {
    call.backward();
    for (int j = 0; j < 40; ++j)
      EXPECT_EQ(std::isnan(call.d_key.as<float>()[j * 16 + 1]), j < 10) << name << j;
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(std::isnan(call.d_query.as<float>()[i * 64])) << name;
  });
}

TEST(SparseAttentionBackward, DenseEqualsTheWholeRangeAsAList) {
  for (const bool separate : {false, true}) {
    for (const std::int64_t heads : {2, 4, 10}) {
      AttentionCall call(45, 230, heads, 2, 20, 12, separate);
      const std::int64_t topk = 235;
      std::vector<std::int32_t> ids(static_cast<std::size_t>(45 * topk), -1);
      for (int i = 0; i < 45; ++i) {
        const int start = i < 30 ? 5 : 110, length = i == 7 ? 0 : i < 30 ? 3 * i + 2 : i + 60;
        call.see(i, start, start + length);
        std::iota(ids.begin() + i * topk, ids.begin() + i * topk + length, start);
      }
      call.forward();
      with_each(explain(call.backward_args()), [&](const std::string& name) {
        call.ids = Array();
        call.backward();
        const Array d_query = call.d_query.clone(), d_key = call.d_key.clone();
        const Array d_value = separate ? call.d_value.clone() : Array();
        call.list(topk, ids);
        call.backward();
        EXPECT_TRUE(same_bits(d_query, call.d_query)) << name;
        EXPECT_TRUE(same_bits(d_key, call.d_key)) << name;
        if (separate) {
          EXPECT_TRUE(same_bits(d_value, call.d_value)) << name;
        }
      });
    }
  }
}

// The certificate lets a backward leave masking out; it is a word about the call, not a request.
TEST(SparseAttentionBackward, TheNonEmptyCertificateChangesNoBit) {
  for (const bool dense : {true, false}) {
    AttentionCall call(12, 40, 3, 1, 18, 10);
    for (int i = 0; i < 12; ++i) call.see(i, 0, i + 1);
    if (!dense) {
      bench::Random random(3);
      call.ids = Array(DType::kI32, {12, 9});
      bench::fill_indices("ascending", 40, call.starts, call.ends, call.ids, random);
    }
    const auto span = [](const Array& t) {
      return std::span(t.as<const std::int32_t>(), static_cast<std::size_t>(t.elements()));
    };
    ASSERT_TRUE(can_prove_all_rows_nonempty(span(call.starts), span(call.ends), 40));
    call.forward();
    with_each(explain(call.backward_args()), [&](const std::string& name) {
      call.backward();
      const Array d_query = call.d_query.clone(), d_key = call.d_key.clone();
      SparseAttentionBackwardArgs args = call.backward_args();
      args.rows_nonempty = true;
      AttentionCall::backward(args);
      EXPECT_TRUE(same_bits(d_query, call.d_query)) << name;
      EXPECT_TRUE(same_bits(d_key, call.d_key)) << name;
    });
  }
}

// Rows of the incoming gradient, of its output and of the keys more than 2^31 elements apart.
TEST(SparseAttentionBackward, StridesBeyond32Bits) {
  AttentionCall call(3, 3, 2, 1, 16, 16);
  call.list(2, {0, 2, 1, 2, 2, 0});
  call.forward();
  const std::int64_t stride = (std::int64_t{1} << 30) + 96;
  const std::size_t bytes = static_cast<std::size_t>(2 * stride + 64) * 4;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 9 GB of addresses";
  with_each(explain(call.backward_args()), [&](const std::string& name) {
    call.backward();
    const Array d_query = call.d_query.clone(), d_key = call.d_key.clone();
    for (Tensor SparseAttentionBackwardArgs::*field :
         {&SparseAttentionBackwardArgs::d_output, &SparseAttentionBackwardArgs::query,
          &SparseAttentionBackwardArgs::key, &SparseAttentionBackwardArgs::d_key}) {
      SparseAttentionBackwardArgs args = call.backward_args();
      Tensor& far = args.*field;
      const Tensor near = far;
      far.data = memory;
      far.strides[0] = stride;
      const auto row_bytes = static_cast<std::size_t>(near.strides[0]) * 4;
      for (std::int64_t i = 0; i < 3; ++i)
        std::memcpy(far.rows(i, 1).data, near.rows(i, 1).data, row_bytes);
      AttentionCall::backward(args);
      EXPECT_TRUE(same_bits(d_query, call.d_query)) << name;
      for (std::int64_t i = 0; i < 3; ++i) {
        EXPECT_EQ(std::memcmp(args.d_key.rows(i, 1).data, d_key.view().rows(i, 1).data, 64), 0)
            << name;
      }
    }
  });
  munmap(memory, bytes);
}

TEST(SparseAttentionBackward, ListsThatCoverTheRowAndNearlyDo) {
  for (const std::int64_t keys : {8, 9}) {  // k and k + 1
    AttentionCall call(8, keys, 2, 1, 8, 8);
    std::vector<std::int32_t> ids;
    for (int i = 0; i < 64; ++i) ids.push_back(i % 8 + (i % 8 >= i / 8 && keys == 9 ? 1 : 0));
    call.list(8, ids);
    call.forward();
    with_each(explain(call.backward_args()), [&](const std::string& name) {
      call.backward();
      for (const Array* out : {&call.d_query, &call.d_key}) {
        for (std::int64_t e = 0; e < out->elements(); ++e)
          EXPECT_TRUE(std::isfinite(out->as<float>()[e])) << name;
      }
    });
  }
}

TEST(SparseAttentionBackward, SequencesInABatchDoNotMix) {
  for (const bool dense : {true, false}) {
    AttentionCall call(40, 40, 3, 1, 18, 10);
    for (int i = 0; i < 40; ++i) call.see(i, i < 17 ? 0 : 17, i + 1);
    if (!dense) {
      bench::Random random(3);
      call.ids = Array(DType::kI32, {40, 12});
      bench::fill_indices("scattered", 40, call.starts, call.ends, call.ids, random);
    }
    call.forward();
    with_each(explain(call.backward_args()), [&](const std::string& name) {
      call.backward();
      const Array d_query = call.d_query.clone(), d_key = call.d_key.clone();
      SparseAttentionBackwardArgs one = call.backward_args();
      for (Tensor* t : {&one.query, &one.starts, &one.ends, &one.output, &one.lse, &one.d_output,
                        &one.d_query, &one.topk_indices}) {
        if (!t->empty()) *t = t->rows(17, 23);
      }
      AttentionCall::backward(one);
      EXPECT_TRUE(same_bits(d_query.view().rows(17, 23), one.d_query)) << name;
      EXPECT_TRUE(same_bits(d_key.view().rows(17, 23), one.d_key.rows(17, 23))) << name;
    });
  }
}

TEST(SparseAttentionBackward, DuplicatesInOneTileAddUp) {
  AttentionCall call(1, 4, 3, 1, 8, 8);
  call.list(7, {2, 1, 2, 2, 0, 1, 2});
  call.forward();
  pin_implementation("sparse_attention_backward", "reference");
  call.backward();
  pin_implementation("sparse_attention_backward", "");
  const Array truth = call.d_key.clone();
  with_each(explain(call.backward_args()), [&](const std::string& name) {
    call.backward();
    for (int e = 0; e < 32; ++e)
      EXPECT_NEAR(call.d_key.as<float>()[e], truth.as<float>()[e], 2e-6) << name;
  });
}

TEST(SparseAttentionBackward, Errors) {
  AttentionCall call(2, 4, 4, 2, 8, 8, true);
  call.forward();
  auto error = [&](const std::function<void(SparseAttentionBackwardArgs&)>& change) {
    SparseAttentionBackwardArgs args = call.backward_args();
    change(args);
    return message_of([&] { AttentionCall::backward(args); });
  };
  EXPECT_EQ(error([](auto&) {}), "no error");
  const Array before = call.d_query.clone();
  EXPECT_EQ(error([](auto& a) { a.d_key.dtype = DType::kBF16; }),
            "[sparse_attention_backward] d_key must be of dtype f32, got bf16");
  EXPECT_EQ(error([](auto& a) { a.d_value = {}; }),
            "[sparse_attention_backward] d_value must be [keys, kv_heads, dim_v] = [4, 2, 8], got "
            "nothing");
  EXPECT_EQ(error([](auto& a) { a.value = {}; }),
            "[sparse_attention_backward] d_value must be left out where value is: d_key holds both "
            "gradients, got f32 [4, 2, 8]");
  EXPECT_EQ(error([](auto& a) { a.d_output.dtype = DType::kBF16; }),
            "[sparse_attention_backward] d_output must be of dtype f32, got bf16");
  EXPECT_EQ(error([](auto& a) { a.d_query = a.query; }),
            "[sparse_attention_backward] d_query must not share memory with query, but they "
            "overlap");
  EXPECT_TRUE(same_bits(before, call.d_query));
}

}  // namespace
}  // namespace winnow
