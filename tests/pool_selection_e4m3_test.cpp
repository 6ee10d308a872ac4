// Pool selection in E4M3: query and pooled keys rotated and quantised, against their numbers in
// double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "tests/each.h"
#include "tests/pool_tokens.h"
#include "winnow/dequantise.h"
#include "winnow/hadamard.h"
#include "winnow/index_topk.h"
#include "winnow/pool_keys.h"
#include "winnow/pools.h"
#include "winnow/quantise.h"

namespace winnow::testing {
namespace {

// To E4M3 and back, by its definition: three bits behind the leading one, at least 2^-9 apart.
double e4m3(double x) {
  if (x == 0) return 0;
  const double step = std::exp2(std::max(-6.0, std::floor(std::log2(std::abs(x)))) - 3);
  return std::clamp(std::nearbyint(x / step) * step, -448.0, 448.0);
}

// The rotated numbers of `x` [.., kDim], rounded to bf16; what E4M3 with one power-of-two scale for
// all channels leaves of them; and the scales.
struct FakeQuantised {
  Array data, scale;
  std::vector<double> value;

  explicit FakeQuantised(const Array& x) {
    const std::int64_t rows = x.elements() / kDim;
    const Array rotated(DType::kBF16, {rows, kDim});
    data = Array(DType::kE4M3, {rows, kDim});
    scale = Array(DType::kF32, {rows, 1});
    const Array back(DType::kF32, {rows, kDim});
    Scratch scratch;
    const HadamardArgs rotate{x.view().reshape({rows, kDim}), rotated};
    hadamard(rotate, scratch.get(hadamard_workspace_bytes(rotate)));
    const QuantiseArgs narrow{rotated, true, 1e-4, data, scale};
    quantise(narrow, scratch.get(quantise_workspace_bytes(narrow)));
    const DequantiseArgs widen{data, scale, back};
    dequantise(widen, scratch.get(dequantise_workspace_bytes(widen)));
    for (std::int64_t i = 0; i < rows; ++i) {
      double largest = 1e-4;
      for (std::int64_t d = 0; d < kDim; ++d)
        largest = std::max(largest, std::abs(at(rotated, i * kDim + d)));
      const double power = std::exp2(std::ceil(std::log2(largest / 448)));
      EXPECT_EQ(at(scale, i), power) << i;
      for (std::int64_t d = 0; d < kDim; ++d) {
        value.push_back(e4m3(at(rotated, i * kDim + d) / power) * power);
        EXPECT_EQ(at(back, i * kDim + d), value.back()) << i << " " << d;
      }
    }
  }
};

// KPool's E4M3 option: query and pooled keys are rotated and quantised over all channels. The scale
// of a query head stands on its weight, that of a key beside the key.
TEST(PoolSelection, E4M3OfQueryAndPooledKeys) {
  constexpr std::int64_t kTokens = 240, kPool = 4, kBest = 8;
  const Tokens in(kTokens, kPool, 28);
  in.key.as<float>()[5] = 900;  // an outlier, and a pool of nothing
  for (std::int64_t n = 40 * kDim; n < 44 * kDim; ++n) in.key.as<float>()[n] = 0;
  const PoolLayout layout = pool_layout(packed_spans(Ids{0, kTokens}), kPool);
  const RowRanges seen = pool_ranges(layout, causal_ranges(kTokens));
  const std::int64_t pools = std::ssize(layout.bases);
  const Array pooled(DType::kF32, {pools, kDim});
  pool_keys({in.key, in.gate, in.ape, ids_of(layout.bases), PoolRounding::kOnce, pooled}, {});
  const FakeQuantised key(pooled), query(in.query);
  const Array weights = in.weights.clone(), found(DType::kI32, {kTokens, kBest}),
              lengths(DType::kI32, {kTokens});
  for (std::int64_t n = 0; n < weights.elements(); ++n)
    weights.as<float>()[n] *= query.scale.as<float>()[n];
  IndexTopkArgs best;
  best.index_query = query.data.view().reshape({kTokens, kHeads, kDim});
  best.index_key = key.data;
  best.index_key_scale = key.scale.view().reshape({pools});
  best.index_weights = weights;
  best.starts = ids_of(seen.starts);
  best.ends = ids_of(seen.ends);
  best.topk_indices = found;
  best.topk_lengths = lengths;
  for_each_implementation(best, [&](const std::string&) {
    Scratch scratch;
    index_topk(best, scratch.get(index_topk_workspace_bytes(best)));
    for (std::int64_t i = 0; i < kTokens; ++i) {
      std::vector<std::pair<double, std::int32_t>> order;  // -score, pool
      for (std::int32_t m = 0; m < seen.ends[static_cast<std::size_t>(i)]; ++m) {
        double total = 0;
        for (std::int64_t h = 0; h < kHeads; ++h) {
          double dot = 0;
          for (std::int64_t d = 0; d < kDim; ++d)
            dot += query.value[static_cast<std::size_t>((i * kHeads + h) * kDim + d)] *
                   key.value[static_cast<std::size_t>(m * kDim + d)];
          total += at(in.weights, i * kHeads + h) * std::max(0.0, dot);
        }
        order.emplace_back(-total, m);
      }
      std::sort(order.begin(), order.end());
      if (order.size() > kBest) {
        const double gap = order[kBest].first - order[kBest - 1].first;
        EXPECT_TRUE(gap > 1e-5 || order[kBest - 1].first == 0) << i << " " << gap;
        order.resize(kBest);
      }
      std::set<std::int32_t> want;
      for (const auto& [negative, pool] : order) want.insert(pool);
      const std::int32_t* list = found.as<std::int32_t>() + i * kBest;
      EXPECT_EQ(Ids(list, list + lengths.as<std::int32_t>()[i]), Ids(want.begin(), want.end()))
          << i;
    }
  });
}

}  // namespace
}  // namespace winnow::testing
