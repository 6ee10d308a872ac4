// The DSA layer by itself: what its indexer scores, and refusals of its configuration.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "attention/layer.h"
#include "tests/tiny_models.h"
#include "winnow/index_scores.h"

namespace winnow::attention {
namespace {

// One indexer whose projections can be set by hand: hidden size = index_dim, one head.
struct Probe {
  AttentionConfig config;
  ParameterList parameters;
  RopeTables ropes;
  Indexer indexer;
  KeyCache cache;
  Memory memory;

  explicit Probe(const AttentionConfig& c, DType dtype = DType::kF64)
      : config(c), ropes(c, dtype), indexer(config, ropes.indexer, parameters, "", dtype) {}

  // Scores of the last row against all keys; x [rows, hidden] at the given positions.
  std::vector<double> last_row_scores(const Tensor& x, const std::vector<std::int32_t>& positions) {
    const std::int64_t rows = x.shape[0];
    RowRanges all;
    all.starts.assign(positions.size(), 0);
    all.ends.assign(positions.size(), static_cast<std::int32_t>(rows));
    const Rows view = rows_of(positions, all);
    cache.fit(config, x.dtype, rows);
    indexer.forward(x, x, view, cache, memory);
    Array scores(x.dtype, {rows, rows});
    IndexScoresArgs a;
    a.index_query = memory.index_query;
    a.index_key = cache.index_key;
    a.index_weights = memory.index_weights;
    a.starts = view.starts;
    a.ends = view.ends;
    a.relu = config.indexer.relu;
    a.index_scores = scores;
    call(index_scores, index_scores_workspace_bytes, a, memory.scratch);
    return model::numbers(scores.view().rows(rows - 1, 1));
  }
};

void set_identity(Parameter& p) {
  p.value.zero();
  const Tensor& t = p.value;
  for (std::int64_t i = 0; i < std::min(t.shape[0], t.shape[1]); ++i) {
    store_double(t.data, t.dtype, i * t.shape[1] + i, 1);
  }
}

// The simplified GQA indexer rotates channels and does nothing else, so its scores show the
// pairing: dim 4, frequencies 1 and 0.01, the query [1, 0, 0, 0] at position 2, key 0 = [0, 1, 0,
// 0] and key 1 = [0, 0, 1, 0] at position 0.
std::vector<double> pairing_scores(nn::RopePairing pairing) {
  AttentionConfig c = model::tiny_simplified();
  c.hidden_size = 4;
  c.rope_theta = 1e4;
  c.indexer.index_dim = 4;
  c.indexer.rope_dim = 4;
  c.indexer.rope_pairing = pairing;
  Probe probe(c);
  set_identity(*probe.parameters.find("wq.weight"));
  set_identity(*probe.parameters.find("wk.weight"));
  Array x(DType::kF64, {3, 4});
  x.as<double>()[1] = 1;      // row 0
  x.as<double>()[4 + 2] = 1;  // row 1
  x.as<double>()[8] = 1;      // row 2, the query
  return probe.last_row_scores(x, {0, 0, 2});
}

TEST(Indexer, H1H2_RopePairingDecidesTheKey) {
  const std::vector<double> interleaved = pairing_scores(nn::RopePairing::kInterleaved);
  EXPECT_NEAR(interleaved[0], std::sin(2.0) / 2, 1e-12);  // the weight is 4^-0.5
  EXPECT_NEAR(interleaved[1], 0, 1e-12);
  const std::vector<double> half_split = pairing_scores(nn::RopePairing::kHalfSplit);
  EXPECT_NEAR(half_split[0], 0, 1e-12);
  EXPECT_NEAR(half_split[1], std::sin(2.0) / 2, 1e-12);
}

// RoPE turns the first channels of an MLA indexer and the last of a GQA indexer.
TEST(Indexer, RotatesTheChannelsOfItsKind) {
  for (const bool mla : {true, false}) {
    AttentionConfig c = mla ? model::tiny_mla() : model::tiny_gqa();
    c.hidden_size = 8;
    c.q_lora_rank = 0;
    c.indexer.index_heads = 1;
    c.indexer.hadamard = false;
    for (const int channel : {1, 6}) {  // one of the first four, one of the last four
      Probe probe(c);
      set_identity(*probe.parameters.find(mla ? "wq_b.weight" : "wq.weight"));
      set_identity(*probe.parameters.find("wk.weight"));
      model::fill_constant(*probe.parameters.find("k_norm.weight"), 1);
      model::fill_constant(*probe.parameters.find("weights_proj.weight"), 1);
      Array x(DType::kF64, {3, 8});  // one content at three positions
      for (int row = 0; row < 3; ++row) x.as<double>()[row * 8 + channel] = 1;
      const std::vector<double> scores = probe.last_row_scores(x, {3, 20, 20});
      EXPECT_GT(scores[1], 0.1);
      EXPECT_EQ(scores[1], scores[2]);
      const bool rotated = mla ? channel < 4 : channel >= 4;
      if (rotated) {
        EXPECT_GT(std::abs(scores[0] - scores[2]), 1e-3) << (mla ? "mla " : "gqa ") << channel;
      } else {
        EXPECT_NEAR(scores[0], scores[2], 1e-12) << (mla ? "mla " : "gqa ") << channel;
      }
    }
  }
}

TEST(Indexer, H4_KeyNormRemovesTheMean) {
  AttentionConfig c = model::tiny_mla();
  c.hidden_size = 8;
  c.q_lora_rank = 0;
  c.indexer.rope_dim = 0;
  c.indexer.hadamard = false;
  Probe probe(c);
  model::fill_constant(*probe.parameters.find("wq_b.weight"), 1);
  set_identity(*probe.parameters.find("wk.weight"));
  model::fill_constant(*probe.parameters.find("k_norm.weight"), 1);
  model::fill_constant(*probe.parameters.find("weights_proj.weight"), 1);
  Array x(DType::kF64, {1, 8});
  for (int i = 0; i < 8; ++i) x.as<double>()[i] = 1;  // an RMSNorm would keep the ones
  EXPECT_EQ(probe.last_row_scores(x, {0})[0], 0);
}

// Orthogonal, so it changes nothing but roundings.
TEST(Indexer, H5_HadamardLeavesScores) {
  std::vector<std::vector<double>> scores;
  for (const bool hadamard : {false, true}) {
    AttentionConfig c = model::tiny_mla();
    c.q_lora_rank = 0;
    c.indexer.index_heads = 16;
    c.indexer.index_dim = 32;
    c.indexer.hadamard = hadamard;
    Probe probe(c, DType::kF32);
    for (const auto& p : probe.parameters.all()) model::fill_normal(*p, 0.5, 1);
    Parameter x;
    x.name = "x";
    x.value = Array(DType::kF32, {20, 12});
    model::fill_normal(x, 1, 2);
    std::vector<std::int32_t> positions(20);
    std::iota(positions.begin(), positions.end(), 0);
    scores.push_back(probe.last_row_scores(x.value, positions));
  }
  double largest = 0;
  for (std::size_t i = 0; i < scores[0].size(); ++i) {
    EXPECT_NEAR(scores[0][i], scores[1][i], 1e-5);
    largest = std::max(largest, std::abs(scores[0][i]));
  }
  EXPECT_GT(largest, 0.1);
  EXPECT_NE(scores[0], scores[1]);  // it did run
}

TEST(Indexer, H7_PositionsMatter) {
  for (const bool frequency : {true, false}) {
    for (AttentionConfig c : {model::tiny_mla(), model::tiny_gqa(), model::tiny_simplified()}) {
      c.q_lora_rank = 0;
      if (!frequency) c.indexer.rope_dim = 0;
      Probe probe(c);
      for (const auto& p : probe.parameters.all()) model::fill_normal(*p, 1, 1);
      Parameter content;
      content.name = "x";
      content.value = Array(DType::kF64, {1, 12});
      model::fill_normal(content, 1, 2);
      Array x(DType::kF64, {2, 12});  // the same content twice
      for (int i = 0; i < 24; ++i) x.as<double>()[i] = content.value.as<double>()[i % 12];
      const std::vector<double> scores = probe.last_row_scores(x, {0, 50});
      if (frequency) {
        EXPECT_GT(std::abs(scores[0] - scores[1]), 1e-3);
      } else {
        EXPECT_EQ(scores[0], scores[1]);
      }
    }
  }
}

// Absorbed attention equals the textbook form with expanded keys and values.
TEST(Mla, AbsorbedEqualsExpanded) {
  AttentionConfig c = model::tiny_mla();
  c.q_lora_rank = 0;
  c.qk_rope_head_dim = 0;
  c.indexer.rope_dim = 0;
  ParameterList parameters;
  const RopeTables ropes(c, DType::kF64);
  Layer layer(c, ropes, parameters, "", DType::kF64);
  for (const auto& p : parameters.all()) model::fill_normal(*p, 0.5, 1);
  const std::int64_t rows = 6, dn = 5, dv = 3, latent = 6, hidden = 12;
  Parameter x;
  x.name = "x";
  x.value = Array(DType::kF64, {rows, hidden});
  model::fill_normal(x, 1, 2);
  const std::vector<std::int32_t> positions = {0, 1, 2, 3, 4, 5};
  const RowRanges ranges = causal_ranges(rows);
  const Rows view = rows_of(positions, ranges);
  Activations activations;
  activations.cache.fit(c, DType::kF64, rows);
  Memory memory;
  Array output(DType::kF64, {rows, hidden});
  layer.forward(x.value, view, {}, activations.kept(), memory, output);

  const auto product = [](const double* weight, const double* in, std::int64_t out_size,
                          std::int64_t in_size) {
    std::vector<double> out(static_cast<std::size_t>(out_size));
    for (std::int64_t o = 0; o < out_size; ++o) {
      for (std::int64_t i = 0; i < in_size; ++i) {
        out[static_cast<std::size_t>(o)] += weight[o * in_size + i] * in[i];
      }
    }
    return out;
  };
  const auto weight = [&](const char* name) { return parameters.find(name)->value.as<double>(); };
  std::vector<std::vector<double>> expanded;  // per key: all heads' [key | value]
  for (std::int64_t j = 0; j < rows; ++j) {
    std::vector<double> l = product(weight("kv_a_proj_with_mqa.weight"),
                                    x.value.as<double>() + j * hidden, latent, hidden);
    double squares = 0;
    for (const double v : l) squares += v * v;
    for (std::size_t i = 0; i < l.size(); ++i) {
      l[i] *= weight("kv_a_layernorm.weight")[i] / std::sqrt(squares / 6 + c.latent_norm_epsilon);
    }
    expanded.push_back(product(weight("kv_b_proj.weight"), l.data(), 3 * (dn + dv), latent));
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::vector<double> q =
        product(weight("q_proj.weight"), x.value.as<double>() + i * hidden, 3 * dn, hidden);
    std::vector<double> heads;
    for (std::int64_t h = 0; h < 3; ++h) {
      std::vector<double> p;
      double total = 0;
      for (std::int64_t j = 0; j <= i; ++j) {
        double z = 0;
        for (std::int64_t d = 0; d < dn; ++d) {
          z += q[static_cast<std::size_t>(h * dn + d)] *
               expanded[static_cast<std::size_t>(j)][static_cast<std::size_t>(h * (dn + dv) + d)];
        }
        p.push_back(std::exp(z / std::sqrt(5.0)));
        total += p.back();
      }
      for (std::int64_t d = 0; d < dv; ++d) {
        double o = 0;
        for (std::size_t j = 0; j < p.size(); ++j) {
          o += p[j] / total * expanded[j][static_cast<std::size_t>(h * (dn + dv) + dn + d)];
        }
        heads.push_back(o);
      }
    }
    const std::vector<double> expected =
        product(weight("o_proj.weight"), heads.data(), hidden, 3 * dv);
    for (std::int64_t o = 0; o < hidden; ++o) {
      EXPECT_NEAR(output.as<double>()[i * hidden + o], expected[static_cast<std::size_t>(o)],
                  1e-12);
    }
  }
}

}  // namespace
}  // namespace winnow::attention
