// Scores and selections in FP8 and MXFP8: exact on the dequantised numbers, scales of their own
// keys, special bytes, what quantisation costs in selected keys, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bench/bounds.h"
#include "bench/case.h"
#include "bench/data.h"
#include "ref/index_score.h"
#include "tests/each.h"
#include "tests/selection_oracle.h"
#include "winnow/dequantise.h"
#include "winnow/hadamard.h"
#include "winnow/index_scores.h"
#include "winnow/index_topk.h"
#include "winnow/quantise.h"

namespace winnow::testing {
namespace {

template <class Args>
void run(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
         const Args& args) {
  Scratch scratch;
  operation(args, scratch.get(bytes(args)));
}
void run(const IndexScoresArgs& args) { run(index_scores, index_scores_workspace_bytes, args); }
void run(const IndexTopkArgs& args) { run(index_topk, index_topk_workspace_bytes, args); }

// Gaussian queries, keys and weights; causal rows.
struct Inputs {
  Array query, key, weights, starts, ends;
  Inputs(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim,
         const char* range = "full")
      : query(dtype, {rows, heads, dim}),
        key(dtype, {keys, dim}),
        weights(DType::kF32, {rows, heads}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}) {
    bench::Random random(7);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random, 1 / std::sqrt(static_cast<double>(heads * dim)));
    bench::fill_ranges(range, keys, 16, starts, ends, random);
  }
  IndexScoresArgs args(const Tensor& scores) const {
    return {query, key, weights, starts, ends, true, scores};
  }
};

// The same call in E4M3, and in f32 with the numbers that the codes stand for.
struct Quantised {
  Array query, query_scale, key, key_scale, weights;  // weights: FP8 folds the query's scale in
  Array plain_query, plain_key;
  const Inputs& from;

  Quantised(const Inputs& in, bool mxfp8) : from(in) {
    const Tensor &q = in.query.view(), &k = in.key.view();
    const std::int64_t dim = q.shape[2], groups = mxfp8 ? dim / 32 : 1;
    const DType scale = mxfp8 ? DType::kE8M0 : DType::kF32;
    query = Array(DType::kE4M3, {q.shape[0], q.shape[1], dim});
    query_scale = Array(scale, {q.shape[0], q.shape[1], groups});
    key = Array(DType::kE4M3, {k.shape[0], dim});
    key_scale = Array(scale, {k.shape[0], groups});
    plain_query = Array(DType::kF32, {q.shape[0], q.shape[1], dim});
    plain_key = Array(DType::kF32, {k.shape[0], dim});
    weights = in.weights.clone();
    quantise({in.query, mxfp8, mxfp8 ? 0 : 1e-4, query, query_scale}, {});
    quantise({in.key, mxfp8, mxfp8 ? 0 : 1e-4, key, key_scale}, {});
    if (mxfp8) {
      decode();
      return;
    }
    for (std::int64_t n = 0; n < weights.elements(); ++n)
      weights.as<float>()[n] *= query_scale.as<float>()[n];
    decode_codes(query, plain_query);
    decode_codes(key, plain_key);
  }
  // After the scales were changed.
  void decode() {
    dequantise({query, query_scale, plain_query}, {});
    dequantise({key, key_scale, plain_key}, {});
  }
  static void decode_codes(const Array& codes, const Array& numbers) {
    for (std::int64_t n = 0; n < codes.elements(); ++n)
      numbers.as<float>()[n] = to_float(codes.as<E4M3>()[n]);
  }
  bool mxfp8() const { return query_scale.view().dtype == DType::kE8M0; }

  IndexScoresArgs args(const Tensor& scores) const {
    IndexScoresArgs a = {query, key, weights, from.starts, from.ends, true, scores};
    if (mxfp8()) a.index_query_scale = query_scale;
    a.index_key_scale =
        mxfp8() ? key_scale.view() : key_scale.view().reshape({key_scale.elements()});
    return a;
  }
  IndexScoresArgs plain(const Tensor& scores) const {
    return {plain_query, plain_key, weights, from.starts, from.ends, true, scores};
  }
};

void expect_same_bits(const Array& a, const Array& b) {
  for (std::int64_t n = 0; n < a.elements(); ++n) {
    const float x = a.as<float>()[n], y = b.as<float>()[n];
    ASSERT_TRUE(std::memcmp(&x, &y, 4) == 0 || (std::isnan(x) && std::isnan(y)))
        << n << ": " << x << " and " << y;
  }
}

TEST(IndexPrecision, Mxfp8EqualsTheDequantisedNumbersBitForBit) {
  for (const std::int64_t dim : {32, 64, 96, 128, 256}) {
    const Inputs in(DType::kBF16, 9, 150, 5, dim, "causal");
    const Quantised q(in, true);
    const Array scores(DType::kF32, {9, 150}), plain(DType::kF32, {9, 150});
    for_each_implementation(q.args(scores), [&](const std::string&) {
      run(q.args(scores));
      run(q.plain(plain));
      expect_same_bits(scores, plain);
    });
  }
}

// FP8: the scale of the key times what the codes alone give.
TEST(IndexPrecision, Fp8EqualsItsCodesTimesTheScaleOfTheKey) {
  const Inputs in(DType::kBF16, 9, 150, 5, 40, "causal");
  const Quantised q(in, false);
  const Array scores(DType::kF32, {9, 150}), plain(DType::kF32, {9, 150});
  for_each_implementation(q.args(scores), [&](const std::string& name) {
    if (name == "reference") return;  // rounds once, at the end
    run(q.args(scores));
    run(q.plain(plain));
    for (std::int64_t i = 0; i < 9; ++i) {
      const std::int64_t seen = in.ends.as<std::int32_t>()[i];
      for (std::int64_t j = 0; j < seen; ++j)
        plain.as<float>()[i * 150 + j] *= q.key_scale.as<float>()[j];
    }
    expect_same_bits(scores, plain);
  });
}

// How far a score may be from the double reference: w q k passes dim + heads + 2 roundings, and one
// more with a scale of the key.
double score_bound(const IndexScoresArgs& args, std::int64_t i, std::int64_t j) {
  const std::int64_t heads = args.index_query.shape[1], dim = args.index_query.shape[2];
  const ref::ScorerKey key(args, i, j);
  double magnitude = 0;
  for (std::int64_t h = 0; h < heads; ++h)
    for (std::int64_t d = 0; d < dim; ++d)
      magnitude += std::abs(ref::get(args.index_weights, i, h) * ref::query_number(args, i, h, d) *
                            key.number(d));
  return bench::gamma(static_cast<double>(dim + heads + 3)) * magnitude * key.factor();
}

// C5: every dim and head count, against the double reference and not against itself.
TEST(IndexPrecision, C5EveryDimAndHeadCountIsRight) {
  for (const std::int64_t dim : {16, 32, 64, 96, 128, 192}) {
    for (const std::int64_t heads : {1, 2, 4, 8, 16, 32, 64}) {
      const Inputs in(DType::kBF16, 2, 19, heads, dim);
      for (const char* format : {"bf16", "e4m3", "mxfp8"}) {
        const bool plain = format == std::string("bf16"), mxfp8 = format == std::string("mxfp8");
        if (mxfp8 && dim % 32 != 0) continue;
        const Array scores(DType::kF32, {2, 19});
        const Quantised q(in, mxfp8);
        const IndexScoresArgs args = plain ? in.args(scores) : q.args(scores);
        for_each_implementation(args, [&](const std::string& name) {
          run(args);
          for (std::int64_t i = 0; i < 2; ++i) {
            for (std::int64_t j = 0; j < 19; ++j) {
              ASSERT_NEAR(at(scores, i * 19 + j), ref::index_score_of(args, i, j),
                          score_bound(args, i, j))
                  << format << " " << name << " dim " << dim << " heads " << heads;
            }
          }
        });
      }
    }
  }
}

// Every head count to 128 and every dim from 16 to 256, in every format: scores against the double
// reference, and the selection against the oracle over the same implementation's scores.
class EveryShape : public ::testing::TestWithParam<const char*> {
 protected:
  static void expect_right(std::int64_t heads, std::int64_t dim) {
    constexpr std::int64_t kRows = 2, kKeys = 19, kTopk = 9;
    const std::string format = GetParam();
    if (format == "mxfp8" && dim % 32 != 0) return;
    const Inputs in(format == "f32" ? DType::kF32 : DType::kBF16, kRows, kKeys, heads, dim);
    const Array scores(DType::kF32, {kRows, kKeys}), ids(DType::kI32, {kRows, kTopk}),
        lengths(DType::kI32, {kRows});
    const bool plain = format == "f32" || format == "bf16";
    std::optional<Quantised> q;
    if (!plain) q.emplace(in, format == "mxfp8");
    const IndexScoresArgs args = plain ? in.args(scores) : q->args(scores);
    IndexTopkArgs topk = {args.index_query,
                          args.index_key,
                          args.index_weights,
                          args.starts,
                          args.ends,
                          true,
                          ids,
                          lengths,
                          {}};
    topk.index_query_scale = args.index_query_scale;
    topk.index_key_scale = args.index_key_scale;
    std::vector<double> truth, bound;
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kKeys; ++j) {
        truth.push_back(ref::index_score_of(args, i, j));
        bound.push_back(score_bound(args, i, j));
      }
    }
    for_each_implementation(args, [&](const std::string& name) {
      run(args);
      for (std::int64_t n = 0; n < kRows * kKeys; ++n) {
        const auto at_n = static_cast<std::size_t>(n);
        ASSERT_NEAR(at(scores, n), truth[at_n], bound[at_n])
            << name << " heads " << heads << " dim " << dim;
      }
      const bench::PinGuard pin("index_topk", name);
      run(topk);
      for (std::int64_t i = 0; i < kRows; ++i) {
        const float* row = scores.as<float>() + i * kKeys;
        const std::int32_t* id = ids.as<std::int32_t>() + i * kTopk;
        ASSERT_EQ(std::vector<std::int32_t>(id, id + kTopk),
                  test::best_ids({row, row + kKeys}, kTopk))
            << name << " heads " << heads << " dim " << dim;
      }
    });
  }
};

TEST_P(EveryShape, HeadsFrom1To128) {
  for (std::int64_t heads = 1; heads <= 128; ++heads) expect_right(heads, 32);
}

TEST_P(EveryShape, DimsFrom16To256) {
  for (std::int64_t dim = 16; dim <= 256; ++dim) expect_right(3, dim);
}

TEST_P(EveryShape, ManyHeadsOfManyChannels) {
  for (const std::int64_t heads : {127, 128})
    for (const std::int64_t dim : {255, 256}) expect_right(heads, dim);
}

INSTANTIATE_TEST_SUITE_P(IndexPrecision, EveryShape,
                         ::testing::Values("f32", "bf16", "e4m3", "mxfp8"),
                         [](const auto& test) { return std::string(test.param); });

// J4: the same scores on every run, whatever the threads; right by the tests above.
TEST(IndexPrecision, J4TwentyRepeatsGiveTheSameBits) {
  for (const char* format : {"f32", "bf16", "e4m3", "mxfp8"}) {
    const bool plain = format == std::string("f32") || format == std::string("bf16");
    const Inputs in(format == std::string("f32") ? DType::kF32 : DType::kBF16, 12, 300, 8, 64,
                    "causal");
    const Array scores(DType::kF32, {12, 300});
    std::optional<Quantised> q;
    if (!plain) q.emplace(in, format == std::string("mxfp8"));
    const IndexScoresArgs args = plain ? in.args(scores) : q->args(scores);
    for_each_implementation(args, [&](const std::string& name) {
      run(args);
      const Array first = scores.clone();
      for (const int count : {1, 16}) {
        const ThreadsGuard threads(count);
        for (int repeat = 0; repeat < (name == "reference" ? 1 : 20); ++repeat) {
          run(args);
          ASSERT_EQ(std::memcmp(scores.view().data, first.view().data,
                                static_cast<std::size_t>(scores.bytes())),
                    0)
              << format << " " << name << " " << count << " threads, repeat " << repeat;
        }
      }
    });
  }
}

// M1: keys of one content under scales 2^0, 2^3, 2^-3, 2^5 score in that ratio, row by row.
TEST(IndexPrecision, M1EveryKeyHasItsOwnScale) {
  const Inputs in(DType::kF32, 3, 64, 4, 64);
  for (std::int64_t n = 0; n < 64 * 64; ++n) in.key.as<float>()[n] = in.key.as<float>()[n % 64];
  for (const bool mxfp8 : {false, true}) {
    Quantised q(in, mxfp8);
    const int exponents[] = {0, 3, -3, 5};
    for (std::int64_t n = 0; n < q.key_scale.elements(); ++n) {
      const std::int64_t j = n / q.key_scale.view().shape[1];
      store_double(q.key_scale.view().data, q.key_scale.view().dtype, n,
                   std::ldexp(1., exponents[j % 4]));
    }
    const Array scores(DType::kF32, {3, 64});
    for_each_implementation(q.args(scores), [&](const std::string&) {
      run(q.args(scores));
      for (std::int64_t n = 0; n < 3 * 64; ++n) {
        const float first = scores.as<float>()[n / 64 * 64];  // exponent 0
        EXPECT_EQ(scores.as<float>()[n], std::ldexp(first, exponents[n % 4])) << n;
      }
    });
  }
}

// M2: the bytes 0, 127, 130, 255 stand for 2^-127, 1, 8 and NaN; a NaN key is never selected and
// its place is taken by the next.
TEST(IndexPrecision, M2SpecialScaleBytes) {
  Inputs in(DType::kF32, 2, 8, 1, 32);
  for (std::int64_t n = 0; n < in.query.elements(); ++n) in.query.as<float>()[n] = 1;
  for (std::int64_t n = 0; n < in.key.elements(); ++n) in.key.as<float>()[n] = 1;
  for (std::int64_t i = 0; i < 2; ++i) in.weights.as<float>()[i] = 1;
  const Quantised q(in, true);
  for (int n = 0; n < 2; ++n) q.query_scale.as<std::uint8_t>()[n] = 127;
  const std::uint8_t bytes[] = {127, 0, 255, 130, 255, 127, 130, 0};
  std::memcpy(q.key_scale.view().data, bytes, 8);
  const Array scores(DType::kF32, {2, 8}), ids(DType::kI32, {2, 7}), lengths(DType::kI32, {2});
  const IndexScoresArgs args = q.args(scores);
  // The code of 1 under a scale of 2^-8 is 256.
  const double unit = 256. * 256 * 32, one = unit, eight = 8 * unit, tiny = std::ldexp(unit, -127);
  const double want[] = {one, tiny, NAN, eight, NAN, one, eight, tiny};
  for_each_implementation(args, [&](const std::string& name) {
    run(args);
    for (int n = 0; n < 16; ++n) {
      if (std::isnan(want[n % 8])) {
        EXPECT_TRUE(std::isnan(at(scores, n))) << n;
      } else {
        EXPECT_EQ(at(scores, n), want[n % 8]) << n;
      }
    }
    IndexTopkArgs topk = {q.query, q.key, q.weights, in.starts, in.ends, true, ids, lengths, {}};
    topk.index_query_scale = q.query_scale;
    topk.index_key_scale = q.key_scale;
    pin_implementation("index_topk", name);
    run(topk);
    pin_implementation("index_topk", "");
    const std::int32_t all[] = {0, 1, 3, 5, 6, 7, -1};
    for (int n = 0; n < 14; ++n) EXPECT_EQ(ids.as<std::int32_t>()[n], all[n % 7]) << n;
    EXPECT_EQ(lengths.as<std::int32_t>()[1], 6);
  });
}

TEST(IndexPrecision, WeightsInBf16EqualTheirNumbersInF32) {
  const Inputs in(DType::kF32, 5, 60, 7, 24);
  const Array narrow(DType::kBF16, {5, 7}), scores(DType::kF32, {5, 60}),
      want(DType::kF32, {5, 60});
  for (std::int64_t n = 0; n < 35; ++n) {
    narrow.as<BF16>()[n] = to_bf16(in.weights.as<float>()[n]);
    in.weights.as<float>()[n] = to_float(narrow.as<BF16>()[n]);
  }
  IndexScoresArgs args = in.args(scores);
  args.index_weights = narrow;
  for_each_implementation(args, [&](const std::string&) {
    run(args);
    run(in.args(want));
    expect_same_bits(scores, want);
  });
}

// A power of two passes through ReLU and sum unchanged; without ReLU any order is the same.
TEST(IndexPrecision, DotScaleIsAFactorBeforeTheRelu) {
  const Inputs in(DType::kBF16, 5, 60, 7, 24);
  const Array scores(DType::kF32, {5, 60}), want(DType::kF32, {5, 60});
  for_each_implementation(in.args(scores), [&](const std::string&) {
    IndexScoresArgs args = in.args(scores);
    args.dot_scale = 0.125;
    run(args);
    run(in.args(want));
    for (std::int64_t n = 0; n < 300; ++n) want.as<float>()[n] *= 0.125f;
    expect_same_bits(scores, want);
  });
}

// Share of the keys that a selection has in common with another.
double overlap(const Array& a, const Array& b) {
  const std::int64_t rows = a.view().shape[0], topk = a.view().shape[1];
  std::int64_t common = 0;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t *x = a.as<std::int32_t>() + i * topk, *y = b.as<std::int32_t>() + i * topk;
    for (std::int64_t s = 0; s < topk; ++s) common += std::binary_search(y, y + topk, x[s]) ? 1 : 0;
  }
  return static_cast<double>(common) / static_cast<double>(rows * topk);
}

double recall(const Inputs& in, bool mxfp8, std::int64_t topk) {
  const std::int64_t rows = in.query.view().shape[0];
  const Array ids(DType::kI32, {rows, topk}), want(DType::kI32, {rows, topk}),
      lengths(DType::kI32, {rows});
  run(IndexTopkArgs{in.query, in.key, in.weights, in.starts, in.ends, true, want, lengths, {}});
  const Quantised q(in, mxfp8);
  const IndexScoresArgs scales = q.args({});
  IndexTopkArgs args = {q.query, q.key, q.weights, in.starts, in.ends, true, ids, lengths, {}};
  args.index_query_scale = scales.index_query_scale;
  args.index_key_scale = scales.index_key_scale;
  run(args);
  return overlap(ids, want);
}

// M4, H5: what quantisation costs, as the overlap with the selection of the f32 scores. Others saw
// 0.92 to 0.96 on Gaussian data. Outliers cost more, and the rotation gives that back.
TEST(IndexPrecision, M4H5OverlapWithTheFullSelection) {
  constexpr std::int64_t kDim = 128, kTopk = 512;
  Inputs in(DType::kF32, 8, 4096, 16, kDim);
  const double fp8 = recall(in, false, kTopk), mxfp8 = recall(in, true, kTopk);
  RecordProperty("overlap_fp8", std::to_string(fp8));
  RecordProperty("overlap_mxfp8", std::to_string(mxfp8));
  EXPECT_GE(fp8, 0.92);
  EXPECT_GE(mxfp8, 0.92);
  EXPECT_LT(mxfp8, 1);  // it was quantised
  for (const Array* t : {&in.query, &in.key})
    for (std::int64_t n = 0; n < t->elements(); ++n)
      if (n % kDim % 32 == 5) t->as<float>()[n] *= 30;
  const double outliers = recall(in, true, kTopk);
  for (const Array* t : {&in.query, &in.key})
    run(hadamard, hadamard_workspace_bytes, HadamardArgs{*t, *t});
  const double rotated = recall(in, true, kTopk);
  RecordProperty("overlap_mxfp8_outliers", std::to_string(outliers));
  RecordProperty("overlap_mxfp8_outliers_rotated", std::to_string(rotated));
  EXPECT_GE(outliers, 0.92);
  EXPECT_GT(rotated, outliers);
}

TEST(IndexPrecision, Refusals) {
  const Inputs in(DType::kF32, 2, 6, 2, 48), good(DType::kF32, 2, 6, 2, 64);
  const Quantised q(good, true), fp8(in, false);
  const Array scores(DType::kF32, {2, 6});
  const auto message = [&](IndexScoresArgs a, auto&& change) {
    change(a);
    return error_of([&] { run(a); });
  };
  EXPECT_EQ(message(q.args(scores), [](auto& a) { a.index_key_scale = {}; }),
            "[index_scores] index_query in e4m3 needs index_key_scale: f32 of each key (FP8), or "
            "e8m0 of 32 channels beside index_query_scale (MXFP8), got nothing");
  EXPECT_EQ(message(q.args(scores), [](auto& a) { a.index_query_scale = {}; }),
            "[index_scores] index_key_scale must be [keys] = [6], got e8m0 [6, 2]");
  EXPECT_EQ(message(fp8.args(scores), [&](auto& a) { a.index_query_scale = q.query_scale; }),
            "[index_scores] MXFP8 needs index_dim to be a multiple of 32, got 48");
  EXPECT_EQ(
      message(q.args(scores), [](auto& a) { a.index_key_scale.shape[1] = 1; }),
      "[index_scores] index_key_scale must be [keys, index_dim / 32] = [6, 2], got e8m0 [6, 1]");
  EXPECT_EQ(message(q.args(scores), [](auto& a) { a.index_query_scale.dtype = DType::kU8; }),
            "[index_scores] index_query_scale must be of dtype e8m0, got u8");
  EXPECT_EQ(
      message(in.args(scores), [&](auto& a) { a.index_key_scale = q.key_scale; }),
      "[index_scores] index_query_scale and index_key_scale must be left out where index_query "
      "is f32, got nothing and e8m0 [6, 2]");
  EXPECT_EQ(message(in.args(scores), [](auto& a) { a.dot_scale = 0; }),
            "[index_scores] dot_scale must be positive and finite, got 0");
}

}  // namespace
}  // namespace winnow::testing
