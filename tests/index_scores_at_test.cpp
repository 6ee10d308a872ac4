// index_scores_at: the bits of index_scores, and what it refuses.
#include "winnow/index_scores_at.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/row_range.h"
#include "bench/data.h"
#include "ref/reader.h"
#include "tests/each.h"
#include "winnow/index_scores.h"

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
