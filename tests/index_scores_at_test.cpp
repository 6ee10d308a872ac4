// index_scores_at and its backward: equal bits, and rows that do not depend on each other.
#include "winnow/index_scores_at.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/row_range.h"
#include "bench/data.h"
#include "ref/reader.h"
#include "tests/each.h"
#include "winnow/index_scores.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::testing {
namespace {

struct Indexer {
  Array query, key, weights, starts, ends, ids, scores;
  Scratch scratch;

  Indexer(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim,
          std::int64_t topk, const char* range, const char* kind)
      : query(dtype, {rows, heads, dim}),
        key(dtype, {keys, dim}),
        weights(DType::kF32, {rows, heads}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        ids(DType::kI32, {rows, topk}),
        scores(DType::kF32, {rows, topk}) {
    bench::Random random(5);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random);
    bench::fill_ranges(range, keys, topk, starts, ends, random);
    bench::fill_indices(kind, keys, starts, ends, ids, random);
  }
  IndexScoresAtArgs args(bool relu) const {
    return {query, key, weights, ids, starts, ends, relu, scores};
  }
};

TEST(IndexScoresAt, BitEqualToIndexScoresOfTheSameImplementation) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (bool relu : {true, false}) {
      Indexer x(dtype, 40, 300, 13, 40, 70, "awkward", "scattered");
      const Array all(DType::kF32, {40, 300});
      for_each_implementation(x.args(relu), [&](const std::string& implementation) {
        pin_implementation("index_scores", implementation);
        const IndexScoresArgs whole{x.query, x.key, x.weights, x.starts, x.ends, relu, all};
        index_scores(whole, x.scratch.get(index_scores_workspace_bytes(whole)));
        pin_implementation("index_scores", "");
        index_scores_at(x.args(relu), x.scratch.get(index_scores_at_workspace_bytes(x.args(relu))));
        int compared = 0;
        for (std::int64_t i = 0; i < 40; ++i) {
          const RowRange r = row_range(x.starts, x.ends, i, 300);
          for (std::int64_t s = 0; s < 70; ++s) {
            const std::int64_t id = ref::get_id(x.ids, i, s);
            const float score = x.scores.as<float>()[i * 70 + s];
            if (!r.contains(id)) {
              EXPECT_EQ(score, -std::numeric_limits<float>::infinity());
              continue;
            }
            ++compared;
            EXPECT_EQ(std::memcmp(&score, all.as<float>() + i * 300 + id - r.start, sizeof score),
                      0);
          }
        }
        EXPECT_GT(compared, 200);
      });
    }
  }
}

// Together, alone, and in several chunks: the gradients by a row's own inputs have the same bits.
// The key gradient of one row alone is what that row adds.
TEST(IndexScoresAtBackward, ARowDoesNotDependOnTheOthers) {
  const std::int64_t rows = 60, keys = 900, heads = 9, dim = 20, topk = 130;
  Indexer x(DType::kF32, rows, keys, heads, dim, topk, "awkward", "scattered");
  Array d_scores(DType::kF32, {rows, topk}), dq(DType::kF32, {rows, heads, dim}),
      dk(DType::kF32, {keys, dim}), dw(DType::kF32, {rows, heads});
  bench::Random random(9);
  bench::fill_gauss(d_scores, random);
  const IndexScoresAtBackwardArgs all{x.query, x.key,    x.weights, x.ids, x.starts, x.ends,
                                      true,    d_scores, dq,        dk,    dw};
  for_each_implementation(all, [&](const std::string&) {
    const ThreadsGuard threads(3);
    index_scores_at_backward(all, x.scratch.get(index_scores_at_backward_workspace_bytes(all)));
    const Array together_q = dq.clone(), together_w = dw.clone();
    for (std::int64_t i = 0; i < rows; i += 7) {
      IndexScoresAtBackwardArgs a = all;
      for (Tensor* t : {&a.index_query, &a.index_weights, &a.topk_indices, &a.starts, &a.ends,
                        &a.d_scores, &a.d_index_query, &a.d_index_weights})
        *t = t->rows(i, 1);
      index_scores_at_backward(a, x.scratch.get(index_scores_at_backward_workspace_bytes(a)));
      EXPECT_EQ(std::memcmp(a.d_index_query.data, together_q.view().rows(i, 1).data,
                            static_cast<std::size_t>(heads * dim) * sizeof(float)),
                0)
          << i;
      EXPECT_EQ(std::memcmp(a.d_index_weights.data, together_w.view().rows(i, 1).data,
                            static_cast<std::size_t>(heads) * sizeof(float)),
                0)
          << i;
      const RowRange r = row_range(x.starts, x.ends, i, keys);
      for (std::int64_t j = 0; j < keys; ++j) {  // nothing outside the row's range
        for (std::int64_t d = 0; d < dim && !r.contains(j); ++d)
          ASSERT_EQ(dk.as<float>()[j * dim + d], 0) << i << " " << j;
      }
    }
  });
}

// Two slots with one id: what both give arrives at the key, also within one register tile.
TEST(IndexScoresAtBackward, AnIdThatStandsTwiceCountsTwice) {
  const std::int64_t keys = 40, heads = 3, dim = 24, topk = 21;
  Indexer x(DType::kF32, 1, keys, heads, dim, topk, "full", "ascending");
  for (std::int64_t s = 0; s < topk; ++s) {
    x.ids.as<std::int32_t>()[s] = static_cast<std::int32_t>(s % 3 == 0 ? 7 : s);
  }
  const Array d_scores(DType::kF32, {1, topk}), dq(DType::kF32, {1, heads, dim}),
      dk(DType::kF32, {keys, dim}), dw(DType::kF32, {1, heads});
  bench::Random random(9);
  bench::fill_gauss(d_scores, random);
  const IndexScoresAtBackwardArgs a{x.query, x.key,    x.weights, x.ids, x.starts, x.ends,
                                    true,    d_scores, dq,        dk,    dw};
  std::vector<float> expected;  // of the implementation that runs, one slot at a time
  for_each_implementation(a, [&](const std::string&) {
    expected.assign(dim, 0);
    for (std::int64_t s = 0; s < topk; ++s) {
      IndexScoresAtBackwardArgs one = a;
      one.topk_indices = x.ids.view().channels(s, 1);
      one.d_scores = d_scores.view().channels(s, 1);
      index_scores_at_backward(one, x.scratch.get(index_scores_at_backward_workspace_bytes(one)));
      for (std::int64_t d = 0; d < dim; ++d) expected[d] += dk.as<float>()[7 * dim + d];
    }
    index_scores_at_backward(a, x.scratch.get(index_scores_at_backward_workspace_bytes(a)));
    for (std::int64_t d = 0; d < dim; ++d) {
      EXPECT_NEAR(dk.as<float>()[7 * dim + d], expected[d], 1e-5 * (1 + std::abs(expected[d])))
          << d;
    }
  });
}

TEST(IndexScoresAt, RefusesWrongArgumentsByName) {
  Indexer x(DType::kF32, 3, 10, 2, 4, 5, "full", "ascending");
  auto message = [&](auto&& change) {
    IndexScoresAtArgs a = x.args(true);
    change(a);
    return error_of([&] { index_scores_at(a, {}); });
  };
  const Array key(DType::kF32, {10, 5}), rows(DType::kI32, {4, 5});
  EXPECT_EQ(message([&](IndexScoresAtArgs& a) { a.index_key = key; }),
            "[index_scores_at] index_key must be [keys, index_dim] = [any, 4], got f32 [10, 5]");
  EXPECT_EQ(message([&](IndexScoresAtArgs& a) { a.topk_indices = rows; }),
            "[index_scores_at] topk_indices must be [rows, topk] = [3, any], got i32 [4, 5]");
  EXPECT_EQ(message([&](IndexScoresAtArgs& a) { a.topk_scores = x.weights; }),
            "[index_scores_at] topk_scores must be [rows, topk] = [3, 5], got f32 [3, 2]");
  EXPECT_EQ(message([&](IndexScoresAtArgs& a) { a.topk_scores.strides[0] = 0; }),
            "[index_scores_at] topk_scores must not overlap itself, got stride 0 on axis 0");
  EXPECT_EQ(message([&](IndexScoresAtArgs& a) { a.index_key.device.kind = Device::Kind::kCuda; }),
            "[index_scores_at] index_key must lie on cpu as topk_scores, got cuda:0");
}

}  // namespace
}  // namespace winnow::testing
