// What the layer's indexer of pools scores: pooled keys and their rounding, E4M3, the scores of Hugging
// Face, and its golden vectors through the whole layer.
#include <bit>
#include <cmath>
#include <set>

#include "base/numbers.h"
#include "model/safetensors.h"
#include "tests/pools_trial.h"
#include "winnow/hadamard.h"
#include "winnow/pool_keys.h"

namespace winnow::attention {
namespace {

// The pooled keys are those of the operation with this rounding, then rotated.
TEST(AttentionPoolScores, PooledKeysFollowTheRounding) {
  std::vector<std::vector<double>> pooled;
  for (const PoolRounding rounding : {PoolRounding::kOnce, PoolRounding::kKeyDtype}) {
    AttentionConfig c = with_pools(model::tiny_mla(), 4, 8);
    c.indexer.pool_rounding = rounding;
    PoolsTrial trial(c, 42, DType::kF32);
    trial.packed({20, 22}).forward();
    const Rows rows = trial.rows();
    const Array expected(DType::kF32, {10, 8});
    Scratch scratch;
    pool_keys({trial.memory.index_key, trial.memory.index_gate,
               trial.parameters.find("indexer.index_kpool_compress_ape")->value, rows.pools.bases,
               rounding, expected},
              {});
    const HadamardArgs turn{expected, expected};
    hadamard(turn, scratch.get(hadamard_workspace_bytes(turn)));
    pooled.push_back(model::numbers(trial.activations.cache.index_key.view().rows(0, 10)));
    EXPECT_EQ(pooled.back(), model::numbers(expected));
  }
  EXPECT_NE(pooled[0], pooled[1]);
}

// To E4M3 and back.
double e4m3(double x) {
  if (x == 0) return 0;
  const double step = std::exp2(std::max(-6.0, std::floor(std::log2(std::abs(x)))) - 3);
  return std::clamp(std::nearbyint(x / step) * step, -448.0, 448.0);
}

// Rotated, rounded to BF16, then to E4M3 with one power of two for all channels, and back.
std::vector<double> quantised(const double* x, std::size_t dim) {
  std::vector<double> y(dim);
  double largest = 1e-4;
  for (std::size_t i = 0; i < dim; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < dim; ++j) sum += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    y[i] = to_double(from_double<BF16>(sum / std::sqrt(static_cast<double>(dim))));
    largest = std::max(largest, std::abs(y[i]));
  }
  const double scale = std::exp2(std::ceil(std::log2(largest / 448)));
  for (double& v : y) v = e4m3(v / scale) * scale;
  return y;
}

TEST(AttentionPoolScores, E4M3SelectsByTheQuantisedScores) {
  AttentionConfig c = with_pools(model::tiny_mla(), 4, 8);
  c.indexer.hadamard = false;
  c.indexer.precision = SelectionPrecision::kE4m3;
  PoolsTrial trial(c, 60, DType::kF32);
  trial.packed({60}).forward();
  const std::vector<double> query = model::numbers(trial.memory.index_query),
                            key = model::numbers(trial.activations.cache.index_key),
                            weights = model::numbers(trial.memory.index_weights),
                            scale = model::numbers(trial.memory.index_query_scale);
  int decided = 0;
  for (std::size_t i = 0; i < 60; ++i) {
    std::vector<std::pair<double, std::int32_t>> order;
    for (std::size_t m = 0; m < (i + 1) / 4; ++m) {
      double total = 0;
      for (std::size_t h = 0; h < 3; ++h) {
        const std::vector<double> q = quantised(&query[(i * 3 + h) * 8], 8),
                                  k = quantised(&key[m * 8], 8);
        double dot = 0;
        for (std::size_t d = 0; d < 8; ++d) dot += q[d] * k[d];
        total += weights[i * 3 + h] / scale[i * 3 + h] * std::max(0.0, dot);
      }
      order.emplace_back(-total, static_cast<std::int32_t>(m));
    }
    std::sort(order.begin(), order.end());
    if (order.size() > 2) {
      EXPECT_TRUE(order[2].first - order[1].first > 1e-6 || order[1].first == 0) << i;
      order.resize(2);
      ++decided;
    }
    std::set<std::int32_t> want;
    for (const auto& [negative, pool] : order) {
      for (std::int32_t t = 0; t < 4; ++t) want.insert(pool * 4 + t);
    }
    for (auto t = static_cast<std::int32_t>((i + 1) / 4 * 4); t <= static_cast<std::int32_t>(i);
         ++t)
      want.insert(t);
    EXPECT_EQ(trial.selected(static_cast<std::int64_t>(i)), Ids(want.begin(), want.end())) << i;
  }
  EXPECT_GT(decided, 40);
}

// Hugging Face's scores: the weights are rounded to BF16 once, and scaled in f32 after that.
TEST(AttentionPoolScores, HfScoringRoundsTheProjectionAlone) {
  AttentionConfig c = with_pools(model::tiny_mla(), 2, 4);
  c.indexer.weights_output = OutputPrecision::kBf16;
  PoolsTrial folded(c, 40, DType::kF32);
  c.indexer.hf_scoring = true;
  PoolsTrial hf(c, 40, DType::kF32);
  for (PoolsTrial* trial : {&folded, &hf}) trial->packed({40}).forward();
  const std::vector<double> a = model::numbers(folded.memory.index_weights),
                            b = model::numbers(hf.memory.index_weights);
  int twice = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double projected = b[i] * std::sqrt(3.0);  // a BF16 number, up to one rounding in f32
    EXPECT_NEAR(to_double(from_double<BF16>(projected)), projected, 1e-6 * std::abs(projected));
    EXPECT_NEAR(a[i] * std::sqrt(8.0), b[i], std::abs(b[i]) / 64);
    twice += std::abs(a[i] * std::sqrt(8.0) - b[i]) > std::abs(b[i]) * 1e-5 ? 1 : 0;
  }
  EXPECT_GT(twice, 40);  // the other form does round again
  // The score of a pool that is selected under both is the same but for roundings; the sets agree
  // except where those decide.
  int equal = 0;
  for (std::int64_t i = 0; i < 40; ++i) equal += folded.selected(i) == hf.selected(i) ? 1 : 0;
  EXPECT_GE(equal, 30);
}

// Golden vectors of Hugging Face through the whole layer: its input holds keys, gates, queries and
// weights side by side, and the projections pick them. The index key stands twice, with both signs,
// so that the norm, of a huge epsilon, takes no mean away.
void expect_golden(const std::string& name, std::int64_t pool_size, std::int64_t topk, bool tail) {
  const model::SafetensorsFile file(std::string(WINNOW_SOURCE_DIR) + "/tests/golden/kpool/" + name);
  const Array query = file.read("query"), key = file.read("key"), gate = file.read("gate"),
              ape = file.read("ape"), weights = file.read("weights"), valid = file.read("valid"),
              expected = file.read("topk_indices");
  const std::int64_t batch = key.view().shape[0], length = key.view().shape[1], dim = 16,
                     heads = 16, rows = batch * length, hidden = dim * (2 + heads) + heads;
  AttentionConfig c = with_pools(without_rotation(model::tiny_mla()), pool_size, topk, tail);
  c.hidden_size = hidden;
  c.q_lora_rank = 0;
  c.indexer.index_heads = heads;
  c.indexer.index_dim = 2 * dim;
  c.indexer.hadamard = false;
  c.indexer.k_norm_epsilon = 1e16;
  PoolsTrial trial(c, rows);
  for (const auto& p : trial.parameters.all()) {
    if (p->indexer) p->value.zero();
  }
  const auto at = [&](const char* parameter, std::int64_t row, std::int64_t column) -> double& {
    const Array& p = trial.parameters.find(parameter)->value;
    const std::int64_t width = p.view().rank == 1 ? 1 : p.view().shape[1];
    return p.as<double>()[row * width + column];
  };
  for (std::int64_t d = 0; d < dim; ++d) {
    at("indexer.wk.weight", d, d) = 1;
    at("indexer.wk.weight", dim + d, d) = -1;
    if (pool_size > 1) {
      at("indexer.index_kpool_compress_gate", d, dim + d) = 1;
      for (std::int64_t t = 0; t < pool_size; ++t) {
        at("indexer.index_kpool_compress_ape", t, d) =
            static_cast<double>(ape.as<float>()[t * dim + d]);
      }
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      at("indexer.wq_b.weight", h * 2 * dim + d, dim * (2 + h) + d) = 1;
    }
  }
  for (std::int64_t d = 0; d < 2 * dim; ++d) at("indexer.k_norm.weight", d, 0) = 1e8;
  for (std::int64_t h = 0; h < heads; ++h) {  // golden: heads^-0.5 inside, and dim^-0.5 beside
    at("indexer.weights_proj.weight", h, dim * (2 + heads) + h) = std::sqrt(2.0 * heads);
  }
  for (std::int64_t t = 0; t < rows; ++t) {
    double* x = trial.x.value.as<double>() + t * hidden;
    for (std::int64_t d = 0; d < dim; ++d) {
      x[d] = static_cast<double>(key.as<float>()[t * dim + d]);
      x[dim + d] = static_cast<double>(gate.as<float>()[t * dim + d]);
    }
    for (std::int64_t d = 0; d < heads * dim; ++d) {
      x[2 * dim + d] = static_cast<double>(query.as<float>()[t * heads * dim + d]);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      x[dim * (2 + heads) + h] = static_cast<double>(weights.as<float>()[t * heads + h]);
    }
  }
  const std::span<const std::uint8_t> mask(valid.as<std::uint8_t>(),
                                           static_cast<std::size_t>(rows));
  trial.ranges = causal_ranges(valid_spans(mask, batch, length), rows);
  trial.forward();
  const std::int64_t width = expected.view().shape[2];
  for (std::int64_t i = 0; i < rows; ++i) {
    std::set<std::int32_t> want;
    for (std::int64_t s = 0; s < width; ++s) {
      const std::int32_t id = expected.as<std::int32_t>()[i * width + s];
      const auto first = static_cast<std::int32_t>(i / length * length);
      if (id >= 0) want.insert(first + id);
    }
    EXPECT_EQ(trial.selected(i), Ids(want.begin(), want.end())) << name << " row " << i;
  }
}

TEST(AttentionPoolScores, GoldenVectorsThroughTheLayer) {
  expect_golden("tail.safetensors", 4, 16, true);
  expect_golden("no_tail.safetensors", 4, 16, false);
  expect_golden("left_padding.safetensors", 4, 16, true);
  expect_golden("pool_one.safetensors", 1, 8, true);
}

}  // namespace
}  // namespace winnow::attention
