// index_loss: small cases with known answers.
#include "winnow/index_loss.h"

#include <cmath>

#include "tests/each.h"

namespace winnow::testing {
namespace {

struct Loss {
  Array target, scores, ids, starts, ends, kl, d_scores;
  Scratch scratch;

  Loss(DType dtype, std::int64_t rows, std::int64_t topk, std::initializer_list<double> t,
       std::initializer_list<double> s, std::initializer_list<std::int32_t> id)
      : target(floats(dtype, {rows, topk}, t)),
        scores(floats(dtype, {rows, topk}, s)),
        ids(ints({rows, topk}, id)),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        kl(dtype, {rows}),
        d_scores(dtype, {rows, topk}) {
    for (std::int64_t i = 0; i < rows; ++i) ends.as<std::int32_t>()[i] = 100;
  }
  IndexLossArgs args(double d_kl = 1) const {
    return {target, scores, ids, starts, ends, d_kl, kl, d_scores};
  }
  void run(double d_kl = 1) {
    index_loss(args(d_kl), scratch.get(index_loss_workspace_bytes(args(d_kl))));
  }
};

constexpr DType kDTypes[] = {DType::kF64, DType::kF32};
double tolerance(DType dtype) { return dtype == DType::kF64 ? 1e-14 : 1e-6; }

TEST(IndexLoss, KnownRow) {  // target [0.75, 0.25] against equal scores
  for (DType dtype : kDTypes) {
    Loss x(dtype, 1, 2, {0.75, 0.25}, {0, 0}, {4, 9});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0), 0.75 * std::log(1.5) + 0.25 * std::log(0.5), tolerance(dtype));
      EXPECT_NEAR(at(x.kl, 0), 0.13081, 1e-5);
      EXPECT_NEAR(at(x.d_scores, 0), -0.25, tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 1), 0.25, tolerance(dtype));
    });
  }
}

// A probability below the least f32: ln p = -495.06 all the same, not -87.34 (which would make
// 42.98 of it). 0.5 (ln 0.5 - 0) + 0.5 (ln 0.5 + 495.06).
TEST(IndexLoss, LnPDoesNotSaturate) {
  for (DType dtype : kDTypes) {
    Loss x(dtype, 1, 2, {0.5, 0.5}, {495.06, 0}, {0, 1});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0), 246.836853, 495.06 * (dtype == DType::kF64 ? 1e-8 : 0x1p-23));
      EXPECT_NEAR(at(x.d_scores, 0), 0.5, tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 1), -0.5, tolerance(dtype));
    });
  }
}

TEST(IndexLoss, TargetIsNormalisedAndInvalidSlotsHoldAnything) {
  const double nan = std::nan("");
  for (DType dtype : kDTypes) {
    Loss x(dtype, 1, 4, {3, nan, 1, 7}, {2, nan, 2, -INFINITY}, {4, -1, 9, 100});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0), 0.75 * std::log(1.5) + 0.25 * std::log(0.5), tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 0), -0.25, tolerance(dtype));
      EXPECT_EQ(at(x.d_scores, 1), 0);
      EXPECT_NEAR(at(x.d_scores, 2), 0.25, tolerance(dtype));
      EXPECT_EQ(at(x.d_scores, 3), 0);
    });
  }
}

TEST(IndexLoss, RowsWithoutAValidSlotGiveNothing) {
  for (DType dtype : kDTypes) {
    Loss x(dtype, 3, 2, {0.75, 0.25, 5, 5, 1, 1}, {0, 0, 1, 2, -INFINITY, -INFINITY},
           {0, 1, -1, -7, 3, 4});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0), 0.13081, 1e-5);
      for (int i = 1; i < 3; ++i) EXPECT_EQ(at(x.kl, i), 0);
      for (int i = 2; i < 6; ++i) EXPECT_EQ(at(x.d_scores, i), 0);
    });
  }
}

TEST(IndexLoss, ScaleMultipliesTheGradientOnly) {  // two valid rows of three: mean is half the sum
  for (DType dtype : kDTypes) {
    Loss x(dtype, 3, 2, {3, 1, 1, 4, 0, 0}, {0.5, -1, 2, 2, 1, 1}, {0, 1, 2, 3, -1, -1});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run(3);
      const Array kl = x.kl.clone(), sum = x.d_scores.clone();
      x.run(1.5);
      for (int i = 0; i < 3; ++i) EXPECT_EQ(at(x.kl, i), at(kl, i));
      for (int i = 0; i < 6; ++i) EXPECT_EQ(at(x.d_scores, i), at(sum, i) / 2);
    });
  }
}

// The small goldens of the contract: a target that normalises to [0.75, 0.25], one of no mass, an
// invalid third slot; two valid rows of three, summed per token and as a mean.
TEST(IndexLoss, PerTokenAndMean) {
  constexpr double kCoefficient = 0.5, kValidRows = 2;
  for (DType dtype : kDTypes) {
    Loss x(dtype, 3, 3, {3, 1, 7, 1, 3, 2, 1, 1, 1}, {0, 0, 9, 1, 1, 9, 5, 5, 5},
           {4, 9, -1, 0, 1, 100, -1, -1, -1});
    for_each_implementation(x.args(), [&](const std::string&) {
      const double row = 0.75 * std::log(1.5) + 0.25 * std::log(0.5);
      for (const bool per_token : {true, false}) {
        const double d_kl = per_token ? kCoefficient : kCoefficient / kValidRows;
        x.run(d_kl);
        double loss = 0;
        for (int i = 0; i < 3; ++i) loss += d_kl * at(x.kl, i);
        EXPECT_NEAR(loss, kCoefficient * row * (per_token ? 2 : 1), tolerance(dtype));
        const double gradient[] = {-0.25, 0.25, 0, 0.25, -0.25, 0, 0, 0, 0};  // p - t
        for (int e = 0; e < 9; ++e)
          EXPECT_NEAR(at(x.d_scores, e), d_kl * gradient[e], tolerance(dtype));
      }
    });
  }
}

// One valid row and one that is all -1, packed in either order.
TEST(IndexLoss, TheTotalDoesNotDependOnPacking) {
  for (DType dtype : kDTypes) {
    Loss one(dtype, 2, 2, {0.75, 0.25, 5, 5}, {0, 0, 3, 4}, {0, 1, -1, -1});
    Loss other(dtype, 2, 2, {5, 5, 0.75, 0.25}, {3, 4, 0, 0}, {-1, -1, 0, 1});
    for_each_implementation(one.args(), [&](const std::string&) {
      one.run();
      other.run();
      EXPECT_EQ(at(one.kl, 0) + at(one.kl, 1), at(other.kl, 0) + at(other.kl, 1));
      EXPECT_NEAR(at(one.kl, 0) + at(one.kl, 1), 0.13081, 1e-5);
    });
  }
}

TEST(IndexLoss, TinyProbabilitiesStayFinite) {  // ln p is clipped nowhere, t at 1e-10 alone
  for (DType dtype : kDTypes) {
    Loss x(dtype, 2, 2, {0.5, 0.5, 1, 1e-14}, {0, -200, -200, 0}, {0, 1, 2, 3});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0), std::log(0.5) + 100, 100 * tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 0), 0.5, tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 1), -0.5, tolerance(dtype));
      EXPECT_NEAR(at(x.kl, 1), 200 + 1e-14 * std::log(1e-10), 200 * tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 2), -1, tolerance(dtype));
    });
  }
}

TEST(IndexLoss, MassBelowTheClampIsNotBlownUp) {  // t = target / 1e-10
  for (DType dtype : kDTypes) {
    Loss x(dtype, 2, 2, {3e-11, 1e-11, 0, 0}, {0, 0, 1, 1}, {0, 1, 0, 1});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_NEAR(at(x.kl, 0),
                  0.3 * (std::log(0.3) + std::log(2)) + 0.1 * (std::log(0.1) + std::log(2)),
                  tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 0), 0.2, tolerance(dtype));
      EXPECT_NEAR(at(x.d_scores, 1), 0.4, tolerance(dtype));
      EXPECT_EQ(at(x.kl, 1), 0);  // no target at all: the gradient is p
      EXPECT_NEAR(at(x.d_scores, 2), 0.5, tolerance(dtype));
    });
  }
}

TEST(IndexLoss, InfiniteAndNanScoresAreNotHidden) {
  const double nan = std::nan("");
  for (DType dtype : kDTypes) {
    Loss x(dtype, 3, 2, {1, 1, 0, 1, 1, 1}, {0, -INFINITY, -INFINITY, 0, 0, nan},
           {0, 1, 0, 1, 0, 1});
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run();
      EXPECT_EQ(at(x.kl, 0), INFINITY);  // target where p is 0
      EXPECT_EQ(at(x.d_scores, 0), 0.5);
      EXPECT_EQ(at(x.d_scores, 1), -0.5);
      EXPECT_EQ(at(x.kl, 1), 0);  // no target where p is 0
      EXPECT_EQ(at(x.d_scores, 2), 0);
      EXPECT_TRUE(std::isnan(at(x.kl, 2)));
      EXPECT_TRUE(std::isnan(at(x.d_scores, 4)));
    });
  }
}

TEST(IndexLoss, GradientEqualsFiniteDifferences) {
  Loss x(DType::kF64, 1, 5, {0.1, 2, 0, 0.7, 1.1}, {0.3, -1, 2, 0.5, -0.2}, {5, 1, 2, -1, 4});
  x.run();
  const Array gradient = x.d_scores.clone();
  for (std::int64_t s = 0; s < 5; ++s) {
    const double h = 1e-5, before = at(x.scores, s);
    x.scores.as<double>()[s] = before + h;
    x.run();
    const double up = at(x.kl, 0);
    x.scores.as<double>()[s] = before - h;
    x.run();
    const double down = at(x.kl, 0);
    x.scores.as<double>()[s] = before;
    EXPECT_NEAR((up - down) / (2 * h), at(gradient, s), 1e-9);
  }
}

TEST(IndexLoss, RefusesWrongArgumentsByName) {
  Loss x(DType::kF32, 1, 2, {1, 1}, {0, 0}, {0, 1});
  auto message = [&](auto&& change) {
    IndexLossArgs a = x.args();
    change(a);
    return error_of([&] { index_loss(a, {}); });
  };
  const Array other(DType::kF32, {1, 3}), wide(DType::kF64, {1, 2});
  EXPECT_EQ(message([&](IndexLossArgs& a) { a.topk_scores = other; }),
            "[index_loss] topk_scores must be [rows, topk] = [1, 2], got f32 [1, 3]");
  EXPECT_EQ(message([&](IndexLossArgs& a) { a.topk_scores = wide; }),
            "[index_loss] topk_scores must be of dtype f32, got f64");
  EXPECT_EQ(message([&](IndexLossArgs& a) { a.d_kl = INFINITY; }),
            "[index_loss] d_kl must be finite, got inf");
  EXPECT_EQ(message([&](IndexLossArgs& a) { a.d_scores = x.scores; }),
            "[index_loss] d_scores must not share memory with topk_scores, but they overlap");
}

TEST(IndexLoss, NoRows) {
  Loss x(DType::kF32, 0, 2, {}, {}, {});
  for_each_implementation(x.args(), [&](const std::string&) { x.run(); });
}

}  // namespace
}  // namespace winnow::testing
