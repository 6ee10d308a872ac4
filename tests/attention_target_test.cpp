// attention_target: small cases with known answers.
#include "winnow/attention_target.h"

#include <cmath>

#include "tests/each.h"
#include "winnow/index_loss.h"

namespace winnow::testing {
namespace {

// Two heads with logits [2, 0] and [0, 2] over two keys; slots in the order of `id`.
struct TwoHeads {
  Array query, key, lse, ids, starts, ends, target;
  Scratch scratch;

  TwoHeads(DType dtype, std::initializer_list<std::int32_t> id, double lse0, double lse1)
      : query(floats(dtype, {1, 2, 2}, {4, 0, 0, 4})),
        key(floats(dtype, {2, 1, 2}, {1, 0, 0, 1})),
        lse(floats(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {1, 2}, {lse0, lse1})),
        ids(ints({1, static_cast<std::int64_t>(id.size())}, id)),
        starts(ints({1}, {0})),
        ends(ints({1}, {2})),
        target(lse.view().dtype, {1, static_cast<std::int64_t>(id.size())}) {}
  AttentionTargetArgs args() const { return {query, key, lse, ids, starts, ends, 0.5, target}; }
  void run() { attention_target(args(), scratch.get(attention_target_workspace_bytes(args()))); }
};

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
const double kLse = std::log(std::exp(2) + 1);

TEST(AttentionTarget, TwoOpposedHeadsShareTheTarget) {
  for (DType dtype : kDTypes) {
    TwoHeads x(dtype, {0, 1}, kLse, kLse);
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.target, 0), 1, 1e-6);  // [0.5, 0.5] once normalised
      EXPECT_NEAR(at(x.target, 1), 1, 1e-6);
    });
  }
}

TEST(AttentionTarget, FollowsTheLseThatWasGiven) {  // a sink of 3 on head 1 is in its lse
  for (DType dtype : kDTypes) {
    TwoHeads x(dtype, {0, 1}, kLse, std::log(std::exp(2) + 1 + std::exp(3)));
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      const double sum = at(x.target, 0) + at(x.target, 1);
      EXPECT_NEAR(at(x.target, 0) / sum, 0.7075, 1e-4);
      EXPECT_NEAR(at(x.target, 1) / sum, 0.2925, 1e-4);
    });
  }
}

TEST(AttentionTarget, InvalidSlotsAndHeadsWithoutKeysGiveZero) {
  for (DType dtype : kDTypes) {
    TwoHeads x(dtype, {-1, 1, 2, INT32_MIN, 0, INT32_MAX}, -INFINITY, kLse);
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      for (int s : {0, 2, 3, 5}) EXPECT_EQ(at(x.target, s), 0);
      EXPECT_NEAR(at(x.target, 1), std::exp(2 - kLse), 1e-6);
      EXPECT_NEAR(at(x.target, 4), std::exp(-kLse), 1e-6);
    });
  }
}

// Two ranks of one head each: the caller adds their targets between the operations, and the loss is
// that of one rank with both heads.
TEST(AttentionTarget, ReducedOverTwoRanksIsTheTargetOfOne) {
  for (DType dtype : {DType::kF64, DType::kF32}) {
    TwoHeads x(dtype, {1, -1, 0}, kLse, std::log(std::exp(2) + 1 + std::exp(3)));
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      const Array one_rank = x.target.clone();
      Array sum(one_rank.view().dtype, {1, 3}), part(one_rank.view().dtype, {1, 3});
      for (const std::int64_t head : {0, 1}) {
        AttentionTargetArgs a = x.args();
        a.query.data = a.query.as<char>() + head * 2 * dtype_bytes(dtype);
        a.query.shape[1] = a.lse.shape[1] = 1;
        a.lse.data = a.lse.as<char>() + head * dtype_bytes(a.lse.dtype);
        a.attention_target = part;
        attention_target(a, x.scratch.get(attention_target_workspace_bytes(a)));
        for (std::int64_t s = 0; s < 3; ++s)
          store_double(sum.view().data, sum.view().dtype, s, at(sum, s) + at(part, s));
      }
      const Array scores = floats(sum.view().dtype, {1, 3}, {0.3, 9, -0.2});
      const auto loss_of = [&](const Array& target, const Array& kl, const Array& d_scores) {
        const IndexLossArgs a{target, scores, x.ids, x.starts, x.ends, 1, kl, d_scores};
        index_loss(a, x.scratch.get(index_loss_workspace_bytes(a)));
      };
      Array kl(sum.view().dtype, {1}), ranks_kl(sum.view().dtype, {1}), d(sum.view().dtype, {1, 3}),
          ranks_d(sum.view().dtype, {1, 3});
      loss_of(one_rank, kl, d);
      loss_of(sum, ranks_kl, ranks_d);
      // A target below 2 is rounded in each part and in their sum, 4 u in all against one rank's
      // own rounding; the loss takes them in with a weight of at most 1 and a logarithm below 2.
      const double u = dtype == DType::kF64 ? 0x1p-53 : 0x1p-24;
      EXPECT_NEAR(at(ranks_kl, 0), at(kl, 0), 32 * u);
      for (std::int64_t s = 0; s < 3; ++s) {
        EXPECT_NEAR(at(sum, s), at(one_rank, s), 6 * u);
        EXPECT_NEAR(at(ranks_d, s), at(d, s), 16 * u);
      }
    });
  }
}

TEST(AttentionTarget, RefusesWrongArgumentsByName) {
  TwoHeads x(DType::kF32, {0, 1}, kLse, kLse);
  auto message = [&](auto&& change) {
    AttentionTargetArgs a = x.args();
    change(a);
    return error_of([&] { attention_target(a, {}); });
  };
  const Array wide(DType::kF64, {1, 2}), none(DType::kI32, {1, 0});
  EXPECT_EQ(message([&](AttentionTargetArgs& a) { a.lse = wide; }),
            "[attention_target] lse must be of dtype f32, got f64");
  EXPECT_EQ(message([&](AttentionTargetArgs& a) { a.topk_indices = none; }),
            "[attention_target] topk must be at least 1, got 0");
  EXPECT_EQ(message([&](AttentionTargetArgs& a) { a.attention_target = x.lse; }),
            "[attention_target] attention_target must not share memory with lse, but they "
            "overlap");
}

}  // namespace
}  // namespace winnow::testing
