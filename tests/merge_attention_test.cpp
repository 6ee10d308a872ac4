// merge_attention: empty parts, parts that are passed on, and partial attentions over split lists
// against the attention over the whole list.
#include "winnow/merge_attention.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "bench/bounds.h"
#include "bench/data.h"
#include "tests/attention_call.h"
#include "tests/each.h"

namespace winnow::testing {
namespace {

struct Merge {
  Array part_output, part_lse, output, lse;
  Scratch scratch;

  Merge(DType dtype, std::int64_t parts, std::int64_t rows, std::int64_t heads, std::int64_t dim_v)
      : part_output(dtype, {parts, rows, heads, dim_v}),
        part_lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {parts, rows, heads}),
        output(dtype, {rows, heads, dim_v}),
        lse(part_lse.view().dtype, {rows, heads}) {
    bench::Random random(5);
    bench::fill_gauss(part_output, random);
    bench::fill_gauss(part_lse, random);
  }
  MergeAttentionArgs args() const { return {part_output, part_lse, output, lse}; }
  void run(const MergeAttentionArgs& a) {
    merge_attention(a, scratch.get(merge_attention_workspace_bytes(a)));
  }
  void run() { run(args()); }
  void set_part(std::int64_t e, double lse_value, double x) {
    store_double(part_lse.view().data, part_lse.view().dtype, e, lse_value);
    const std::int64_t dim_v = part_output.view().shape[3];
    for (std::int64_t c = 0; c < dim_v; ++c)
      store_double(part_output.view().data, part_output.view().dtype, e * dim_v + c, x);
  }
};

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};

TEST(MergeAttention, AnEmptyPartContributesNothingWhateverItHolds) {
  for (const DType dtype : kDTypes) {
    for (const double garbage : {std::nan(""), HUGE_VAL, -HUGE_VAL, 3e38}) {
      for (const std::int64_t owner : {0, 1, 2}) {
        Merge x(dtype, 3, 1, 1, 19);
        for (std::int64_t p = 0; p < 3; ++p)
          if (p != owner) x.set_part(p, -INFINITY, garbage);
        store_double(x.part_lse.view().data, x.part_lse.view().dtype, owner, 2);
        for_each_implementation(x.args(), [&](const std::string&) {
          x.run();
          const Tensor part = x.part_output.view().rows(owner, 1);
          EXPECT_EQ(std::memcmp(x.output.as<void>(), part.data,
                                static_cast<std::size_t>(x.output.bytes())),
                    0);
          EXPECT_EQ(at(x.lse, 0), 2);
        });
      }
    }
  }
}

TEST(MergeAttention, OnePartIsPassedOnBitForBit) {
  for (const DType dtype : kDTypes) {
    Merge x(dtype, 1, 3, 2, 21);
    x.set_part(1, -0.0, -0.0);  // the sign of a zero stays
    x.set_part(2, -3e38, 1);
    x.set_part(3, 3e38, 1);
    x.set_part(4, HUGE_VAL, std::nan(""));
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_TRUE(same_bits(x.output, x.part_output));
      EXPECT_TRUE(same_bits(x.lse, x.part_lse));
    });
  }
}

TEST(MergeAttention, NoPartAndEmptyPartsGiveZeroAndMinusInfinity) {
  for (const DType dtype : kDTypes) {
    for (const std::int64_t parts : {0, 1, 4}) {
      Merge x(dtype, parts, 2, 1, 9);
      for (std::int64_t e = 0; e < 2 * parts; ++e) x.set_part(e, -INFINITY, std::nan(""));
      for_each_implementation(x.args(), [&](const std::string&) {
        std::memset(x.output.as<void>(), 0xff, static_cast<std::size_t>(x.output.bytes()));
        x.run();
        for (std::int64_t e = 0; e < 18; ++e) EXPECT_EQ(at(x.output, e), 0);
        for (std::int64_t e = 0; e < 2; ++e) EXPECT_EQ(at(x.lse, e), -INFINITY);
      });
    }
  }
}

TEST(MergeAttention, LargeAndSmallLse) {
  struct {
    double lse0, lse1, output, lse;  // of parts 1 and 3
  } const cases[] = {{-524288, -524288, 2, -524288 + std::log(2)},
                     {524288, 524288, 2, 524288 + std::log(2)},
                     {-3e38, 3e38, 3, 3e38},
                     {3e38, -3e38, 1, 3e38},
                     {-3e38, -3e38, 2, -3e38}};
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const auto& c : cases) {
      Merge x(dtype, 2, 1, 1, 3);
      x.set_part(0, c.lse0, 1);
      x.set_part(1, c.lse1, 3);
      for_each_implementation(x.args(), [&](const std::string&) {
        x.run();
        // One rounding of a weight, of their sum, of the quotient: 4 ulp of 2 and of the lse.
        for (std::int64_t e = 0; e < 3; ++e) EXPECT_NEAR(at(x.output, e), c.output, 8 * 0x1p-23);
        EXPECT_NEAR(at(x.lse, 0), c.lse, 4 * 0x1p-23 * std::abs(c.lse));
      });
    }
  }
}

TEST(MergeAttention, ABrokenPartIsNotHidden) {
  for (const double lse : {HUGE_VAL, std::nan("")}) {
    Merge x(DType::kF32, 2, 1, 1, 3);
    x.set_part(0, lse, 1);
    x.set_part(1, 0, 1);
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      for (std::int64_t e = 0; e < 3; ++e) EXPECT_TRUE(std::isnan(at(x.output, e)));
      EXPECT_TRUE(std::isnan(at(x.lse, 0)));
    });
  }
}

TEST(MergeAttention, ARowDependsOnItselfOnly) {
  Merge x(DType::kF32, 5, 90, 3, 20);
  for_each_implementation(x.args(), [&](const std::string&) {
    const ThreadsGuard threads(3);
    x.run();
    const Array together = x.output.clone(), together_lse = x.lse.clone();
    for (const std::int64_t row : {0, 21, 22, 89}) {
      MergeAttentionArgs one = x.args();
      one.part_output.data = x.part_output.as<float>() + row * 60;
      one.part_output.shape[1] = one.part_lse.shape[1] = 1;
      one.part_lse.data = x.part_lse.as<float>() + row * 3;
      one.output = one.output.rows(row, 1);
      one.lse = one.lse.rows(row, 1);
      std::memset(one.output.data, 0xff, 60 * sizeof(float));
      x.run(one);
      EXPECT_TRUE(same_bits(one.output, together.view().rows(row, 1)));
      EXPECT_TRUE(same_bits(one.lse, together_lse.view().rows(row, 1)));
    }
  });
}

// Keys dealt out to two ranks, `interleave` in turn: each attends to its own of the selected keys,
// also a rank that owns none of them. Two runs of sparse_attention and the merge against one run:
// each is off from the truth by
//   relative   gamma(dim_qk + 3) scale |q| . |k| of a logit, at most `logit` here,
//              twice (weight and sum), and gamma(slots + 20) for exp, sums and quotients,
// times the magnitude of the values, at most 1 here; the merge adds gamma(8) and the |lse| u of its
// weights.
TEST(MergeAttention, SplitListsEqualTheWholeList) {
  const struct {
    int interleave;
    std::vector<std::int32_t> lists[2];
  } splits[] = {{1, {{0, 4, -1, -1}, {3, 9, -1, -1}}},
                {4, {{0, 3, 9, -1}, {4, -1, -1, -1}}},
                {10, {{0, 3, 4, 9}, {-1, -1, -1, -1}}}};
  AttentionCall call(1, 10, 6, 1, 24, 16, true);
  for (std::int64_t e = 0; e < call.value.elements(); ++e) {
    float& v = call.value.as<float>()[e];
    v = std::max(-1.f, std::min(1.f, v));
  }
  double logit = 0;
  for (std::int64_t h = 0; h < 6; ++h) {
    for (const int j : {0, 3, 4, 9}) {
      double sum = 0;
      for (int d = 0; d < 24; ++d)
        sum += std::abs(call.scale * call.query.as<float>()[h * 24 + d] *
                        call.key.as<float>()[j * 24 + d]);
      logit = std::max(logit, sum);
    }
  }
  const double one_run = 2 * bench::gamma(24 + 3) * logit + bench::gamma(4 + 20);
  const double bound = 3 * one_run + bench::gamma(8 + logit + 2);
  with_each(explain(call.forward_args()), [&](const std::string& name) {
    call.list(4, {0, 3, 4, 9});
    call.forward();
    const Array output = call.output.clone(), lse = call.lse.clone();
    for (const auto& split : splits) {
      Merge merge(DType::kF32, 2, 1, 6, 16);
      for (const std::int64_t rank : {0, 1}) {
        call.list(4, split.lists[rank]);
        SparseAttentionArgs part = call.forward_args();
        part.output =
            make_tensor(merge.part_output.as<float>() + rank * 96, DType::kF32, {1, 6, 16});
        part.lse = make_tensor(merge.part_lse.as<float>() + rank * 6, DType::kF32, {1, 6});
        AttentionCall::forward(part);
      }
      merge.run();
      if (split.interleave == 10) {
        EXPECT_TRUE(same_bits(merge.output, output)) << name;
        EXPECT_TRUE(same_bits(merge.lse, lse)) << name;
      }
      for (std::int64_t e = 0; e < 96; ++e) EXPECT_NEAR(at(merge.output, e), at(output, e), bound);
      for (std::int64_t h = 0; h < 6; ++h) EXPECT_NEAR(at(merge.lse, h), at(lse, h), bound * 4);
    }
  });
}

TEST(MergeAttention, Errors) {
  Merge x(DType::kBF16, 2, 3, 4, 8);
  auto message = [&](auto&& change) {
    MergeAttentionArgs a = x.args();
    change(a);
    return error_of([&] { merge_attention(a, {}); });
  };
  EXPECT_EQ(message([](auto& a) { a.part_lse.dtype = DType::kBF16; }),
            "[merge_attention] part_lse must be of dtype f32, got bf16");
  EXPECT_EQ(message([](auto& a) { a.part_lse.shape[0] = 3; }),
            "[merge_attention] part_lse must be [parts, rows, heads] = [2, 3, 4], got f32 [3, 3, "
            "4]");
  EXPECT_EQ(message([](auto& a) { a.output = a.part_output; }),
            "[merge_attention] output must be [rows, heads, dim_v] = [3, 4, 8], got bf16 [2, 3, 4, "
            "8]");
  EXPECT_EQ(message([](auto& a) { a.output.dtype = DType::kF16; }),
            "[merge_attention] output must be of dtype bf16, got f16");
  EXPECT_EQ(message([](auto& a) { a.lse.data = a.part_lse.data; }),
            "[merge_attention] lse must not share memory with part_lse, but they overlap");
}

}  // namespace
}  // namespace winnow::testing
