// KPool and NoPE in the layer: against the plain reference in double, over packed sequences, padding
// and explicit origins; options of the scores; certificates; what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "attention/layer.h"
#include "attention/pools.h"
#include "model/safetensors.h"
#include "tests/each.h"
#include "tests/layer_reference.h"
#include "tests/tiny_models.h"
#include "winnow/hadamard.h"
#include "winnow/pool_keys.h"

namespace winnow::attention {
namespace {

using Ids = std::vector<std::int32_t>;

// One layer with random weights and rows; what it computes stays in the fields.
struct Trial {
  AttentionConfig config;
  DType dtype;
  ParameterList parameters;
  RopeTables ropes;
  Layer layer;
  Activations activations;
  Memory memory;
  Parameter x;
  Ids positions;
  RowRanges ranges;
  std::vector<std::int64_t> cu_seqlens;  // left out, unless a test says them
  TokenSpans spans;
  PoolTables pools;
  Array output, d_output, d_x;

  explicit Trial(const AttentionConfig& c, std::int64_t rows, DType type = DType::kF64)
      : config(c),
        dtype(type),
        ropes(c, type),
        layer(c, ropes, parameters, "", type),
        positions(static_cast<std::size_t>(rows)) {
    for (const auto& p : parameters.all()) model::fill_normal(*p, 0.5, 1);
    x.name = "x";
    x.value = Array(type, {rows, c.hidden_size});
    model::fill_normal(x, 1, 2);
  }
  std::int64_t count() const { return std::ssize(positions); }
  // Packed sequences of these lengths; what is left of the rows is padding.
  Trial& packed(const Ids& lengths) {
    Ids cuts = {0};
    std::size_t row = 0;
    for (const std::int32_t length : lengths) {
      for (std::int32_t p = 0; p < length; ++p) positions[row++] = p;
      cuts.push_back(cuts.back() + length);
    }
    ranges = packed_ranges(cuts, count());
    return *this;
  }
  Rows rows() {
    Rows view;
    view.positions = positions;
    view.starts = make_tensor(ranges.starts.data(), DType::kI32, {count()});
    view.ends = make_tensor(ranges.ends.data(), DType::kI32, {count()});
    if (config.indexer.pools()) {
      pools.whole(ranges, cu_seqlens, spans, config.indexer.pool_size);
      view.pools = pools.view();
    }
    return view;
  }
  LayerOptions sparse() const {
    LayerOptions options;
    options.mode = AttentionMode::kSparse;
    return options;
  }
  void forward(const LayerOptions& options) {
    activations.cache.fit(config, dtype, count());
    output = Array(dtype, {count(), config.hidden_size});
    layer.forward(x.value, rows(), options, activations.kept(), memory, output);
  }
  void forward() { forward(sparse()); }
  void backward() {
    d_output = output.clone();
    d_x = Array(dtype, {count(), config.hidden_size});
    for (const auto& p : parameters.all()) p->grad.zero();
    layer.backward(x.value, rows(), sparse(), activations.kept(), d_output, d_x, {}, memory);
  }
  bool certificate() const { return activations.core.selected.rows_nonempty; }
  Ids selected(std::int64_t row) const {
    const Tensor& ids = activations.selection.topk_indices;
    const std::int32_t* list = ids.as<std::int32_t>() + row * ids.shape[1];
    const std::int32_t length = activations.selection.topk_lengths.as<std::int32_t>()[row];
    for (std::int64_t s = length; s < ids.shape[1]; ++s) EXPECT_EQ(list[s], -1);
    return {list, list + length};
  }
  std::vector<double> row(std::int64_t i) const { return model::numbers(output.view().rows(i, 1)); }
};

AttentionConfig with_pools(AttentionConfig c, std::int64_t pool_size, std::int64_t topk,
                           bool tail = true) {
  c.indexer.pool_size = pool_size;
  c.indexer.topk = topk;
  c.indexer.select_tail = tail;
  c.max_positions = 256;
  return c;
}

AttentionConfig without_rotation(AttentionConfig c) {
  c.qk_rope_head_dim = c.indexer.rope_dim = 0;
  c.rope_theta = 0;
  return c;
}

std::vector<AttentionConfig> kinds() {
  AttentionConfig plain = without_rotation(model::tiny_mla());
  plain.q_lora_rank = 0;
  return {model::tiny_mla(),
          model::tiny_gqa(),
          model::tiny_simplified(),
          without_rotation(model::tiny_mla()),
          without_rotation(model::tiny_gqa()),
          without_rotation(model::tiny_simplified()),
          plain};
}

// `origins`: where the sequence of each row begins; left out: where the row does.
void expect_reference(Trial& trial, const Ids& origins = {}) {
  const LayerReference reference(trial.config, trial.parameters, trial.x.value, trial.positions);
  trial.forward();
  for (std::int64_t i = 0; i < trial.count(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int32_t start = trial.ranges.starts[at], end = trial.ranges.ends[at];
    const Ids want = end <= start
                         ? Ids{}
                         : reference.selected(i, start, end, origins.empty() ? start : origins[at]);
    ASSERT_EQ(trial.selected(i), want) << "row " << i;
    const std::vector<double> expected = reference.output(i, want), got = trial.row(i);
    for (std::size_t d = 0; d < got.size(); ++d) {
      // Some hundred roundings of numbers below 100.
      ASSERT_NEAR(got[d], expected[d], 1e-11) << "row " << i;
    }
  }
}

// Every kind with and without rotation, pools (1: none), tail and packing; two rows of padding.
TEST(AttentionPools, EqualsThePlainReference) {
  struct Sizes {
    std::int64_t pool, topk;
  };
  for (std::size_t kind = 0; kind < kinds().size(); ++kind) {
    for (const Sizes& sizes : {Sizes{1, 5}, {2, 4}, {3, 6}, {4, 4}, {8, 16}}) {
      for (const bool tail : {true, false}) {
        if (sizes.pool == 1 && !tail) continue;
        const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                           fmt::format("kind {} pool {}", kind, sizes.pool));
        Trial trial(with_pools(kinds()[kind], sizes.pool, sizes.topk, tail), 42);
        expect_reference(trial.packed({23, 0, 1, 7, 9}));
      }
    }
  }
}

// Padding on the left: pools begin at the first key that is there.
TEST(AttentionPools, RowsOfAPaddedBatchStartTheirPools) {
  Trial trial(with_pools(without_rotation(model::tiny_mla()), 4, 8), 30);
  const std::vector<std::uint8_t> mask = [] {
    std::vector<std::uint8_t> m(30, 1);
    for (const std::size_t t : {0, 1, 2, 15, 29}) m[t] = 0;  // 3 to 14 and 16 to 28
    return m;
  }();
  trial.ranges = causal_ranges(valid_spans(mask, 2, 15), 30);
  for (std::int32_t t = 0; t < 30; ++t) trial.positions[static_cast<std::size_t>(t)] = t % 15;
  expect_reference(trial);
}

// A window over one sequence: its rows start at other keys, so only the caller knows where pools
// begin.
TEST(AttentionPools, ExplicitOriginsForRowsThatStartLater) {
  Trial trial(with_pools(model::tiny_mla(), 4, 8), 40);
  trial.packed({2, 38});
  for (std::size_t i = 2; i < 40; ++i) {
    trial.ranges.starts[i] = std::max(2, static_cast<std::int32_t>(i) - 19);
  }
  const std::string message = testing::error_of([&] { trial.forward(); });
  EXPECT_NE(message.find("Batch::spans"), std::string::npos) << message;
  EXPECT_NE(message.find("from key 3 on"), std::string::npos) << message;
  trial.cu_seqlens = {0, 2, 40};
  EXPECT_EQ(testing::error_of([&] { trial.forward(); }), message);
  trial.spans = packed_spans(Ids{0, 2, 40});
  Ids origins(40, 2);
  origins[0] = origins[1] = 0;
  expect_reference(trial, origins);
}

// Below the budget a row attends to all that it sees.
TEST(AttentionPools, BelowBudgetIsTheCausalPrefix) {
  for (const Ids& lengths : {Ids{8}, Ids{7}, Ids{3}, Ids{3, 6}, Ids{5, 9, 3}}) {
    std::int64_t rows = 0;
    for (const std::int32_t length : lengths) rows += length;
    Trial trial(with_pools(model::tiny_mla(), 4, 16), rows, DType::kF32);
    trial.packed(lengths).forward();
    EXPECT_EQ(trial.activations.selection.topk_indices.view().shape[1], 19);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto at = static_cast<std::size_t>(i);
      Ids prefix;
      for (std::int32_t t = trial.ranges.starts[at]; t < trial.ranges.ends[at]; ++t) {
        prefix.push_back(t);
      }
      EXPECT_EQ(trial.selected(i), prefix) << i;
    }
    EXPECT_TRUE(trial.certificate());
  }
}

// A pack selects in each sequence what the sequence alone selects, with the same bits of output.
TEST(AttentionPools, APoolNeverSpansTwoSequences) {
  const Ids lengths = {13, 1, 6, 22};
  Trial together(with_pools(model::tiny_mla(), 4, 8), 42, DType::kF32);
  together.packed(lengths).forward();
  std::int32_t first = 0;
  for (const std::int32_t length : lengths) {
    Trial alone(with_pools(model::tiny_mla(), 4, 8), length, DType::kF32);
    alone.packed({length});
    std::copy_n(together.x.value.as<float>() + first * 12, length * 12, alone.x.value.as<float>());
    alone.forward();
    for (std::int32_t i = 0; i < length; ++i) {
      Ids shifted = alone.selected(i);
      for (std::int32_t& id : shifted) id += first;
      EXPECT_EQ(together.selected(first + i), shifted);
      EXPECT_EQ(together.row(first + i), alone.row(i));
    }
    first += length;
  }
}

// F10: nothing of a later token reaches a row, through no pool either. Row 2 of 8 sees no pool of 4,
// whatever the best key of group 1.
TEST(AttentionPools, F10TrainingNeverSeesTheFuture) {
  Trial before(with_pools(model::tiny_mla(), 4, 4), 8), after(before.config, 8);
  before.packed({8}).forward();
  EXPECT_EQ(before.selected(2), (Ids{0, 1, 2}));  // the tail
  for (std::int64_t t = 3; t < 8; ++t) {
    after.packed({8});
    std::copy_n(before.x.value.as<double>(), 8 * 12, after.x.value.as<double>());
    for (std::int64_t d = 0; d < 12; ++d) after.x.value.as<double>()[t * 12 + d] *= -3;
    after.forward();
    for (std::int64_t i = 0; i < t; ++i) {
      EXPECT_EQ(before.row(i), after.row(i)) << t;
      EXPECT_EQ(before.selected(i), after.selected(i)) << t;
    }
    EXPECT_NE(before.row(t), after.row(t)) << t;
  }
}

// Rows before the first whole pool attend to nothing: no output, no gradient, and no certificate
// even where all rows have one.
TEST(AttentionPools, WithoutTailNothingIsCertified) {
  Trial trial(with_pools(model::tiny_mla(), 4, 8, false), 11);
  trial.packed({11}).forward();
  EXPECT_FALSE(trial.certificate());
  trial.backward();
  for (std::int64_t i = 0; i < 11; ++i) {
    const std::vector<double> row = trial.row(i);
    EXPECT_EQ(trial.selected(i).empty(), i < 3);
    EXPECT_EQ(std::all_of(row.begin(), row.end(), [](double v) { return v == 0; }), i < 3);
  }
  for (std::int64_t i = 0; i < trial.d_x.elements(); ++i) {
    EXPECT_TRUE(std::isfinite(trial.d_x.as<double>()[i]));
  }
  // Rows that all see a whole pool, still.
  Trial late(with_pools(without_rotation(model::tiny_mla()), 4, 8, false), 8);
  late.packed({8});
  for (std::int32_t& end : late.ranges.ends) end = 8;
  late.forward();
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_FALSE(late.selected(i).empty());
  EXPECT_FALSE(late.certificate());
}

// The word of a selection with its tail changes no bit of a gradient: a row of padding takes it away.
TEST(AttentionPools, TheCertificateChangesNoBit) {
  Trial with(with_pools(model::tiny_mla(), 4, 8), 11, DType::kF32),
      without(with.config, 12, DType::kF32);
  with.packed({7, 4}).forward();
  with.backward();
  without.packed({7, 4});
  std::copy_n(with.x.value.as<float>(), 11 * 12, without.x.value.as<float>());
  without.forward();
  without.backward();
  EXPECT_TRUE(with.certificate());
  EXPECT_FALSE(without.certificate());
  EXPECT_EQ(model::numbers(with.d_x), model::numbers(without.d_x.view().rows(0, 11)));
  for (std::size_t p = 0; p < with.parameters.all().size(); ++p) {
    EXPECT_EQ(model::numbers(with.parameters.all()[p]->grad),
              model::numbers(without.parameters.all()[p]->grad));
    if (with.parameters.all()[p]->indexer) {
      for (const double g : model::numbers(with.parameters.all()[p]->grad)) EXPECT_EQ(g, 0);
    }
  }
}

// Pools of fewer tokens than one needs: nothing to score, the tail alone; and no rows at all.
TEST(AttentionPools, NoPoolAndNoRow) {
  Trial trial(with_pools(model::tiny_mla(), 8, 8), 5);
  expect_reference(trial.packed({3, 2}));
  Trial none(with_pools(model::tiny_mla(), 4, 16), 0, DType::kF32);
  none.packed({}).forward();
  EXPECT_EQ(none.activations.selection.topk_indices.view().shape[0], 0);
  EXPECT_EQ(none.activations.selection.topk_indices.view().shape[1], 19);
}

// The pooled keys are those of the operation with this rounding, then rotated.
TEST(AttentionPools, PooledKeysFollowTheRounding) {
  std::vector<std::vector<double>> pooled;
  for (const PoolRounding rounding : {PoolRounding::kOnce, PoolRounding::kKeyDtype}) {
    AttentionConfig c = with_pools(model::tiny_mla(), 4, 8);
    c.indexer.pool_rounding = rounding;
    Trial trial(c, 42, DType::kF32);
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

TEST(AttentionPools, E4M3SelectsByTheQuantisedScores) {
  AttentionConfig c = with_pools(model::tiny_mla(), 4, 8);
  c.indexer.hadamard = false;
  c.indexer.precision = SelectionPrecision::kE4m3;
  Trial trial(c, 60, DType::kF32);
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
TEST(AttentionPools, HfScoringRoundsTheProjectionAlone) {
  AttentionConfig c = with_pools(model::tiny_mla(), 2, 4);
  c.indexer.weights_output = OutputPrecision::kBf16;
  Trial folded(c, 40, DType::kF32);
  c.indexer.hf_scoring = true;
  Trial hf(c, 40, DType::kF32);
  for (Trial* trial : {&folded, &hf}) trial->packed({40}).forward();
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
  Trial trial(c, rows);
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

TEST(AttentionPools, GoldenVectorsThroughTheLayer) {
  expect_golden("tail.safetensors", 4, 16, true);
  expect_golden("no_tail.safetensors", 4, 16, false);
  expect_golden("left_padding.safetensors", 4, 16, true);
  expect_golden("pool_one.safetensors", 1, 8, true);
}

// NoPE: without rotary channels nothing depends on positions, and with them it does.
TEST(AttentionNoPe, PositionsDoNotMatter) {
  for (const bool rotates : {false, true}) {
    for (const AttentionConfig& kind :
         {model::tiny_mla(), model::tiny_gqa(), model::tiny_simplified()}) {
      const AttentionConfig c = rotates ? kind : without_rotation(kind);
      validate(c);
      Trial near(c, 30), far(c, 30);
      near.packed({30}).forward();
      far.packed({30});
      for (std::int32_t& p : far.positions) p = 63 - (p * 7) % 30;
      far.forward();
      near.backward();
      far.backward();
      const bool same = model::numbers(near.output) == model::numbers(far.output) &&
                        model::numbers(near.d_x) == model::numbers(far.d_x);
      EXPECT_EQ(same, !rotates);
      if (!rotates) {
        EXPECT_TRUE(near.ropes.attention.cosine.empty() && near.ropes.indexer.cosine.empty());
      }
    }
  }
}

// Rows whose ranges do not overlap look like sequences of their own, unless the sequences are said.
TEST(AttentionPools, SequencesThatAreSaidAreBelieved) {
  RowRanges rows;
  rows.starts = {0, 3, 6};
  rows.ends = {3, 6, 9};
  EXPECT_EQ(spans_of(rows).begins, (Ids{0, 3, 6}));
  EXPECT_EQ(spans_of(rows, std::vector<std::int64_t>{0, 3, 3, 6, 9}).begins, (Ids{0, 3, 6}));
  EXPECT_NE(testing::error_of([&] {
              spans_of(rows, std::vector<std::int64_t>{0, 9});
            }).find("from key 3 on"),
            std::string::npos);
}

TEST(AttentionPools, RefusesWhatPoolsCannotDo) {
  const AttentionConfig good = with_pools(model::tiny_mla(), 4, 8);
  const auto refusal = [&](auto&& change) {
    AttentionConfig c = good;
    change(c.indexer);
    return testing::error_of([&] { validate(c); });
  };
  EXPECT_EQ(refusal([](IndexerConfig&) {}), "");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.topk = 6; }),
            "[config] attention.indexer.topk must be a multiple of attention.indexer.pool_size = "
            "4, got 6");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.pool_size = 0; }),
            "[config] attention.indexer.pool_size must be from 1 to 4096, got 0");
  EXPECT_EQ(refusal([](IndexerConfig& i) {
              i.index_dim = 32;
              i.precision = SelectionPrecision::kMxfp8;
            }),
            "[config] attention.indexer.precision \"mxfp8\" needs pool_size 1, got 4");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.precision = SelectionPrecision::kE4m3; }),
            "[config] attention.indexer.precision \"e4m3\" needs hadamard to be false: it rotates "
            "by itself");
  EXPECT_EQ(refusal([](IndexerConfig& i) {
              i.hadamard = false;
              i.pool_size = 1;
              i.precision = SelectionPrecision::kE4m3;
            }),
            "[config] attention.indexer.precision \"e4m3\" needs pool_size above 1, got 1");
  const auto hf = [](IndexerConfig& i) {
    i.hf_scoring = true;
    i.weights_output = OutputPrecision::kBf16;
  };
  EXPECT_EQ(refusal(hf), "");
  const std::string head = "[config] attention.indexer.hf_scoring needs attention.indexer.";
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.hf_scoring = true; }),
            head + "weights_output \"bf16\"");
  EXPECT_EQ(refusal([&](IndexerConfig& i) { hf(i), i.pool_size = 1; }), head + "pool_size above 1");
  EXPECT_EQ(refusal([&](IndexerConfig& i) { hf(i), i.relu = false; }), head + "relu");

  // And at run time.
  Trial trial(good, 9, DType::kF32);
  trial.packed({9});
  const std::string frozen =
      "[attention] an indexer of pools does not learn, pool_size is 4: use the mode sparse (or "
      "dense) and no indexer loss";
  LayerOptions options = trial.sparse();
  options.index_loss = true;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), frozen);
  options = {};
  options.mode = AttentionMode::kWarmup;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), frozen);
  options.mode = AttentionMode::kDense;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), "");
  Rows bare = trial.rows();
  bare.pools = {};
  EXPECT_EQ(testing::error_of([&] {
              trial.layer.forward(trial.x.value, bare, trial.sparse(), trial.activations.kept(),
                                  trial.memory, trial.output);
            }),
            "[attention] with pool_size 4 every one of 9 rows needs its range of pools "
            "(PoolTables), got 0");
}

}  // namespace
}  // namespace winnow::attention
