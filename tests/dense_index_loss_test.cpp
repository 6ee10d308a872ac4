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

// The workspace holds runs and tiles, whose sizes know nothing of the number of keys.
TEST(DenseIndexLoss, TheWorkspaceDoesNotGrowWithTheKeys) {
  const ThreadsGuard threads(4);
  const auto bytes_for = [](std::int64_t rows, std::int64_t keys) {
    auto f32 = [](std::initializer_list<std::int64_t> shape) {
      return make_tensor(nullptr, DType::kF32, shape);
    };
    const Tensor ints = make_tensor(nullptr, DType::kI32, {rows});
    return dense_index_loss_workspace_bytes({f32({rows, 16, 64}),
                                             f32({keys, 64}),
                                             f32({rows, 16}),
                                             true,
                                             f32({rows, 8, 96}),
                                             f32({keys, 1, 96}),
                                             f32({rows, 8}),
                                             0.1,
                                             ints,
                                             ints,
                                             1,
                                             {},
                                             f32({rows}),
                                             f32({rows, 16, 64}),
                                             f32({keys, 64}),
                                             f32({rows, 16})});
  };
  for (const char* name : {"cpu.avx2", "cpu.portable"}) {
    pin_implementation("dense_index_loss", name);
    for (const std::int64_t rows : {1, 3, 64, 5000}) {
      const std::int64_t few = bytes_for(rows, 100);
      EXPECT_EQ(bytes_for(rows, 1000000), few) << name << rows;
      EXPECT_EQ(bytes_for(rows, (std::int64_t{1} << 31) - 1), few) << name << rows;
      // Per row: the targets and scores of a tile, 8 x 96 queries, 16 heads with gates of 1024
      // keys, three rows of 64 channels, 16 x 8 + 8 partial weights and a weight, 48 more; then
      // 16384 targets kept per row, the rows of a tile, and what a thread packs.
      const std::int64_t row = 2 * 1024 + 8 * 96 + 16 * (1024 + 3 * 64 + 137) + 48;
      const std::int64_t thread = 2 * 64 * 64 + 16 * 96 + 16 * 16;
      const std::int64_t run = std::min<std::int64_t>(rows, 64);
      const std::int64_t kept = std::max<std::int64_t>(run, 16) * 16384;
      EXPECT_LE(few, 4 * (run * row + kept + 1024 * 64 + 4 * thread) + 4096);
    }
    pin_implementation("dense_index_loss", "");
  }
}

// 66 rows of one head see more keys than can be kept for so many rows: targets are computed, and
// shown to the callback, twice. The bits are those of rows on their own, which are kept.
TEST(DenseIndexLoss, TargetsThatAreNotKeptGiveTheSameBits) {
  const std::int64_t keys = 17500;
  Dense x(DType::kF32, {66, keys, 1, 3, 1, 1, 2}, "causal");
  for_each_implementation(x.args(), [&](const std::string& name) {
    DenseIndexLossArgs a = x.args();
    std::int64_t elements = 0, largest = 0;
    a.reduce_target = [&](Tensor tile) {
      elements += tile.elements();
      largest = std::max(largest, tile.elements());
    };
    x.run(a);
    EXPECT_LE(largest, 64 * 1024);
    if (name != "reference") {
      EXPECT_GT(elements, 66 * keys);
      EXPECT_LE(elements, 2 * 66 * (keys + 64));
    }
    const Array kl = x.kl.clone(), dq = x.d_index_query.clone(), dw = x.d_index_weights.clone();
    for (const std::int64_t i : {0, 40, 63, 64, 65}) {
      DenseIndexLossArgs one = x.args();
      for (Tensor* t : {&one.index_query, &one.index_weights, &one.query, &one.lse, &one.starts,
                        &one.ends, &one.kl, &one.d_index_query, &one.d_index_weights})
        *t = t->rows(i, 1);
      std::int64_t alone = 0;
      one.reduce_target = [&](Tensor tile) { alone += tile.elements(); };
      x.run(one);
      EXPECT_LE(alone, keys + 64);
      EXPECT_TRUE(same_bytes(one.kl, kl.view().rows(i, 1))) << name << " row " << i;
      EXPECT_TRUE(same_bytes(one.d_index_query, dq.view().rows(i, 1))) << name << " row " << i;
      EXPECT_TRUE(same_bytes(one.d_index_weights, dw.view().rows(i, 1))) << name << " row " << i;
    }
  });
}

// Two ranks that own half of the attention heads each: rank 1's tiles are recorded, and the call of
// rank 0 adds them as an all-reduce would.
TEST(DenseIndexLoss, ReducedOverTwoRanksEqualsOneRank) {
  for (DType dtype : {DType::kF64, DType::kF32}) {
    // The second shape has targets that are computed, and reduced, twice.
    for (const Shape& s : {Shape{70, 150, 4, 16, 4, 2, 16}, Shape{34, 18000, 1, 2, 4, 2, 2}}) {
      const char* range = s.keys == 150 ? "packed" : "causal";
      Dense x(dtype, s, range);
      for_each_implementation(x.args(), [&](const std::string&) {
        x.run(x.args());
        const Array kl = x.kl.clone(), dq = x.d_index_query.clone(), dk = x.d_index_key.clone(),
                    dw = x.d_index_weights.clone();
        auto rank = [&](std::int64_t r) {  // contiguous halves of the heads
          Dense half(dtype, {s.rows, s.keys, s.index_heads, s.index_dim, 2, 1, s.dim_qk}, range);
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

// Blocks, tiles and lanes are counted from a row's start: a sequence gives the same bits wherever
// it lies in the key space.
TEST(DenseIndexLoss, APackedSequenceHasTheBitsOfTheSequenceAlone) {
  constexpr std::int64_t kFirst = 37, kRest = 1200;
  Dense x(DType::kF32, {kFirst + kRest, kFirst + kRest, 3, 9, 2, 1, 10}, "causal");
  for (std::int64_t i = kFirst; i < kFirst + kRest; ++i) x.starts.as<std::int32_t>()[i] = kFirst;
  for_each_implementation(x.args(), [&](const std::string& name) {
    if (name == "reference") return;  // slow, and has no blocks
    x.run(x.args());
    const Array kl = x.kl.clone(), dq = x.d_index_query.clone(), dk = x.d_index_key.clone();
    DenseIndexLossArgs a = x.args();
    for (Tensor* t : {&a.index_query, &a.index_weights, &a.query, &a.lse, &a.starts, &a.ends, &a.kl,
                      &a.d_index_query, &a.d_index_weights, &a.index_key, &a.key, &a.d_index_key})
      *t = t->rows(kFirst, kRest);
    Array starts(DType::kI32, {kRest}), ends(DType::kI32, {kRest});
    for (std::int64_t i = 0; i < kRest; ++i)
      ends.as<std::int32_t>()[i] = static_cast<std::int32_t>(i + 1);
    a.starts = starts;
    a.ends = ends;
    x.run(a);
    EXPECT_TRUE(same_bytes(a.kl, kl.view().rows(kFirst, kRest)));
    EXPECT_TRUE(same_bytes(a.d_index_query, dq.view().rows(kFirst, kRest)));
    EXPECT_TRUE(same_bytes(a.d_index_key, dk.view().rows(kFirst, kRest)));
  });
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
