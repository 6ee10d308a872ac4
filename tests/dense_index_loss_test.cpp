// dense_index_loss: against the sparse loss, finite differences and simulated ranks.
#include "winnow/dense_index_loss.h"

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/data.h"
#include "bench/guarded.h"
#include "ref/attention.h"
#include "tests/each.h"
#include "winnow/attention_target.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::testing {
namespace {

struct Shape {
  std::int64_t rows, keys, index_heads, index_dim, heads, kv_heads, dim_qk;
};

constexpr double kScale = 0.4;

// A call with Gaussian inputs, ranges of `range`, and the lse of dense attention.
struct Dense {
  Array index_query, index_key, index_weights, query, key, lse, starts, ends;
  Array kl, d_index_query, d_index_key, d_index_weights;
  bool relu = true;
  double d_kl = 0.7;
  Scratch scratch;

  Dense(DType dtype, const Shape& s, const char* range, std::uint64_t seed = 3) {
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    index_query = Array(dtype, {s.rows, s.index_heads, s.index_dim});
    index_key = Array(dtype, {s.keys, s.index_dim});
    index_weights = Array(wide, {s.rows, s.index_heads});
    query = Array(dtype, {s.rows, s.heads, s.dim_qk});
    key = Array(dtype, {s.keys, s.kv_heads, s.dim_qk});
    lse = Array(wide, {s.rows, s.heads});
    starts = Array(DType::kI32, {s.rows});
    ends = Array(DType::kI32, {s.rows});
    kl = Array(wide, {s.rows});
    d_index_query = Array(wide, {s.rows, s.index_heads, s.index_dim});
    d_index_key = Array(wide, {s.keys, s.index_dim});
    d_index_weights = Array(wide, {s.rows, s.index_heads});
    bench::Random random(seed);
    bench::fill_gauss(index_query, random);
    bench::fill_gauss(index_key, random);
    bench::fill_gauss(index_weights, random);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_ranges(range, s.keys, 8, starts, ends, random);
    for (std::int64_t i = 0; i < s.rows; ++i) {
      const RowRange r = row_range(starts, ends, i, s.keys);
      for (std::int64_t h = 0; h < s.heads; ++h) {
        double sum = 0;
        for (std::int64_t j = r.start; j < r.end; ++j)
          sum += std::exp(kScale *
                          ref::head_dot(query, i, h, key, j, h / (s.heads / s.kv_heads), s.dim_qk));
        ref::set(lse, i, h, std::log(sum));
      }
    }
  }

  DenseIndexLossArgs args() const {
    return {index_query, index_key,     index_weights, relu,           query, key,
            lse,         kScale,        starts,        ends,           d_kl,  {},
            kl,          d_index_query, d_index_key,   d_index_weights};
  }
  void run(const DenseIndexLossArgs& a) {
    dense_index_loss(a, scratch.get(dense_index_loss_workspace_bytes(a)));
  }
  double total() {
    run(args());
    double sum = 0;
    for (std::int64_t i = 0; i < kl.elements(); ++i) sum += at(kl, i);
    return sum;
  }
};

void expect_near(const Array& actual, const Array& expected, double tolerance) {
  ASSERT_EQ(actual.elements(), expected.elements());
  for (std::int64_t i = 0; i < actual.elements(); ++i)
    ASSERT_NEAR(at(actual, i), at(expected, i), tolerance) << i;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.data, b.data,
                     static_cast<std::size_t>(a.elements() * dtype_bytes(a.dtype))) == 0;
}

TEST(DenseIndexLoss, GradientsEqualFiniteDifferences) {
  for (bool relu : {true, false}) {
    Dense x(DType::kF64, {3, 7, 2, 3, 2, 1, 4}, "causal");
    x.relu = relu;
    x.total();
    const Array gradients[] = {x.d_index_query.clone(), x.d_index_key.clone(),
                               x.d_index_weights.clone()};
    const Array* inputs[] = {&x.index_query, &x.index_key, &x.index_weights};
    for (int n = 0; n < 3; ++n) {
      for (std::int64_t e = 0; e < inputs[n]->elements(); ++e) {
        double& value = inputs[n]->as<double>()[e];
        const double h = 1e-5, before = value;
        value = before + h;
        const double up = x.total();
        value = before - h;
        const double down = x.total();
        value = before;
        EXPECT_NEAR(x.d_kl * (up - down) / (2 * h), at(gradients[n], e), 1e-8) << n << " " << e;
      }
    }
  }
}

// The same loss through attention_target, index_scores_at, index_loss and the backward, with every
// visible key selected.
TEST(DenseIndexLoss, EqualsTheSparseLossOverAllKeys) {
  for (const char* range : {"causal", "packed", "awkward"}) {
    const Shape s{20, 40, 3, 5, 4, 2, 6};
    Dense x(DType::kF64, s, range);
    Array ids(DType::kI32, {s.rows, s.keys}), target(DType::kF64, {s.rows, s.keys}),
        scores(DType::kF64, {s.rows, s.keys}), d_scores(DType::kF64, {s.rows, s.keys}),
        kl(DType::kF64, {s.rows});
    for (std::int64_t i = 0; i < s.rows; ++i) {
      const RowRange r = row_range(x.starts, x.ends, i, s.keys);
      for (std::int64_t t = 0; t < s.keys; ++t) {
        ids.as<std::int32_t>()[i * s.keys + t] =
            static_cast<std::int32_t>(t < r.length() ? r.start + t : -1);
      }
    }
    Dense y(DType::kF64, s, range);  // takes the sparse gradients
    attention_target({x.query, x.key, x.lse, ids, x.starts, x.ends, kScale, target}, {});
    index_scores_at(
        {x.index_query, x.index_key, x.index_weights, ids, x.starts, x.ends, x.relu, scores}, {});
    index_loss({target, scores, ids, x.starts, x.ends, x.d_kl, kl, d_scores}, {});
    const IndexScoresAtBackwardArgs backward{
        x.index_query, x.index_key, x.index_weights, ids,           x.starts,         x.ends,
        x.relu,        d_scores,    y.d_index_query, y.d_index_key, y.d_index_weights};
    index_scores_at_backward(backward,
                             x.scratch.get(index_scores_at_backward_workspace_bytes(backward)));
    x.run(x.args());
    expect_near(x.kl, kl, 1e-12);
    expect_near(x.d_index_query, y.d_index_query, 1e-12);
    expect_near(x.d_index_key, y.d_index_key, 1e-12);
    expect_near(x.d_index_weights, y.d_index_weights, 1e-12);
  }
}

// Two ranks that own half of the attention heads each: rank 1's tiles are recorded, and the call of
// rank 0 adds them as an all-reduce would.
TEST(DenseIndexLoss, ReducedOverTwoRanksEqualsOneRank) {
  for (DType dtype : {DType::kF64, DType::kF32}) {
    const Shape s{70, 150, 4, 16, 4, 2, 16};
    Dense x(dtype, s, "packed");
    for_each_implementation(x.args(), [&](const std::string&) {
      x.run(x.args());
      const Array kl = x.kl.clone(), dq = x.d_index_query.clone(), dk = x.d_index_key.clone(),
                  dw = x.d_index_weights.clone();
      auto rank = [&](std::int64_t r) {  // contiguous halves of the heads
        Dense half(dtype, {s.rows, s.keys, s.index_heads, s.index_dim, 2, 1, s.dim_qk}, "packed");
        for (std::int64_t i = 0; i < s.rows; ++i) {
          for (std::int64_t h = 0; h < 2; ++h) {
            ref::set(half.lse, i, h, ref::get(x.lse, i, 2 * r + h));
            for (std::int64_t d = 0; d < s.dim_qk; ++d)
              ref::set(half.query, i, h, d, ref::get(x.query, i, 2 * r + h, d));
          }
        }
        for (std::int64_t j = 0; j < s.keys; ++j) {
          for (std::int64_t d = 0; d < s.dim_qk; ++d)
            ref::set(half.key, j, 0, d, ref::get(x.key, j, r, d));
        }
        DenseIndexLossArgs a = half.args();
        a.index_query = x.index_query;
        a.index_key = x.index_key;
        a.index_weights = x.index_weights;
        return std::pair(std::move(half), a);
      };
      std::vector<Array> tiles;
      auto [one, one_args] = rank(1);
      one_args.reduce_target = [&](Tensor tile) {
        EXPECT_TRUE(tile.contiguous());
        EXPECT_EQ(tile.rank, 2);
        tiles.emplace_back(tile.dtype,
                           std::initializer_list<std::int64_t>{tile.shape[0], tile.shape[1]});
        std::memcpy(tiles.back().view().data, tile.data,
                    static_cast<std::size_t>(tiles.back().bytes()));
      };
      one.run(one_args);
      auto [zero, zero_args] = rank(0);
      std::size_t next = 0;
      const std::thread::id caller = std::this_thread::get_id();
      zero_args.reduce_target = [&](Tensor tile) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        ASSERT_LT(next, tiles.size());
        const Array& other = tiles[next++];
        ASSERT_EQ(tile.shape, other.view().shape);
        for (std::int64_t e = 0; e < tile.elements(); ++e) {
          const double sum = load_double(tile.data, tile.dtype, e) + at(other, e);
          store_double(tile.data, tile.dtype, e, sum);
        }
      };
      zero.run(zero_args);
      EXPECT_EQ(next, tiles.size());
      // Scores and gates are those of the one-rank call; t differs by the order of its four-head
      // sum, a few roundings, and enters the results through sums of at most rows terms near 1.
      const double tolerance = dtype == DType::kF64 ? 1e-13 : 64 * 0x1p-24;
      expect_near(zero.kl, kl, 16 * tolerance);
      expect_near(zero.d_index_query, dq, tolerance);
      expect_near(zero.d_index_key, dk, 8 * tolerance);
      expect_near(zero.d_index_weights, dw, 8 * tolerance);
    });
  }
}

TEST(DenseIndexLoss, ARowDoesNotDependOnTheOthers) {
  for (const char* range : {"causal", "packed", "awkward"}) {
    Dense x(DType::kF32, {75, 210, 5, 24, 4, 2, 20}, range);
    for_each_implementation(x.args(), [&](const std::string&) {
      const ThreadsGuard threads(3);
      x.run(x.args());
      const Array kl = x.kl.clone(), dq = x.d_index_query.clone(), dw = x.d_index_weights.clone();
      const DenseIndexLossArgs all = x.args();
      for (std::int64_t i : {0, 1, 7, 37, 63, 64, 74}) {
        for (std::int64_t count : {1, 5}) {
          if (i + count > 75) continue;
          DenseIndexLossArgs a = all;
          for (Tensor* t : {&a.index_query, &a.index_weights, &a.query, &a.lse, &a.starts, &a.ends,
                            &a.kl, &a.d_index_query, &a.d_index_weights})
            *t = t->rows(i, count);
          x.run(a);
          EXPECT_TRUE(same_bytes(a.kl, kl.view().rows(i, count))) << range << " row " << i;
          EXPECT_TRUE(same_bytes(a.d_index_query, dq.view().rows(i, count))) << range << " " << i;
          EXPECT_TRUE(same_bytes(a.d_index_weights, dw.view().rows(i, count))) << range << " " << i;
        }
      }
    });
  }
}

// The thread count belongs to the next call; this one has its workspace already.
TEST(DenseIndexLoss, AThreadCountSetWithinTheCallWaitsForTheNext) {
  Dense x(DType::kF32, {400, 600, 3, 17, 2, 1, 24}, "full");
  for_each_implementation(x.args(), [&](const std::string&) {
    const ThreadsGuard threads(1);
    x.run(x.args());
    const Array kl = x.kl.clone(), dk = x.d_index_key.clone();
    DenseIndexLossArgs a = x.args();
    a.reduce_target = [](Tensor) { set_num_threads(17); };
    const std::int64_t bytes = dense_index_loss_workspace_bytes(a);
    const bench::Guarded workspace(DType::kU8, {bytes});  // a write past it ends the test
    dense_index_loss(a, {workspace.view().data, bytes});
    EXPECT_EQ(num_threads(), 17);
    EXPECT_TRUE(same_bytes(x.kl, kl));
    EXPECT_TRUE(same_bytes(x.d_index_key, dk));
  });
}

TEST(DenseIndexLoss, EmptyRowsAndEmptyKeySpaces) {
  for (const Shape& s :
       {Shape{3, 0, 2, 8, 2, 1, 8}, Shape{0, 5, 2, 8, 2, 1, 8}, Shape{2, 9, 2, 8, 2, 1, 8}}) {
    Dense x(DType::kF32, s, "full");
    if (s.keys == 9) x.ends.zero();
    for_each_implementation(x.args(), [&](const std::string&) {
      std::memset(x.kl.view().data, 0x7f, static_cast<std::size_t>(x.kl.bytes()));
      std::memset(x.d_index_key.view().data, 0x7f, static_cast<std::size_t>(x.d_index_key.bytes()));
      x.run(x.args());
      for (const Array* out : {&x.kl, &x.d_index_query, &x.d_index_key, &x.d_index_weights}) {
        for (std::int64_t e = 0; e < out->elements(); ++e) EXPECT_EQ(at(*out, e), 0);
      }
    });
  }
}

TEST(DenseIndexLoss, RefusesWrongArgumentsByName) {
  Dense x(DType::kF32, {3, 7, 2, 3, 2, 1, 4}, "causal");
  auto message = [&](auto&& change) {
    DenseIndexLossArgs a = x.args();
    change(a);
    return error_of([&] { dense_index_loss(a, {}); });
  };
  const Array keys(DType::kF32, {8, 1, 4}), heads(DType::kF32, {3, 3});
  EXPECT_EQ(message([&](DenseIndexLossArgs& a) { a.key = keys; }),
            "[dense_index_loss] key must be [keys, kv_heads, dim_qk] = [7, any, any], got f32 [8, "
            "1, 4]");
  EXPECT_EQ(message([&](DenseIndexLossArgs& a) { a.lse = heads; }),
            "[dense_index_loss] lse must be [rows, heads] = [3, 2], got f32 [3, 3]");
  EXPECT_EQ(message([&](DenseIndexLossArgs& a) { a.softmax_scale = 0; }),
            "[dense_index_loss] softmax_scale must be positive and finite, got 0");
  EXPECT_EQ(message([&](DenseIndexLossArgs& a) { a.d_index_weights = a.index_weights; }),
            "[dense_index_loss] d_index_weights must not share memory with index_weights, but they "
            "overlap");
}

}  // namespace
}  // namespace winnow::testing
