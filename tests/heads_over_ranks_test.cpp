// Tensor parallelism, of which the layer knows one thing: where heads are spread over ranks, the
// indexer learns from the attention of all of them. Ranks with parts of the heads have the indexer's
// loss and gradient of one that has all, and their outputs add up to its output.
#include <gtest/gtest.h>

#include "attention/layer.h"
#include "comm/collectives.h"
#include "model/initialise.h"
#include "tests/thread_ranks.h"
#include "tests/tiny_models.h"

namespace winnow::attention {
namespace {

using testing::run_ranks;
using testing::ThreadCommunicator;

constexpr std::int64_t kRows = 23;

// One layer, and what a sparse call of it leaves.
struct Call {
  AttentionConfig config;
  RopeTables ropes;
  ParameterList parameters;
  Layer layer;
  Activations kept;
  Memory memory;
  Array output;
  LayerResult result;

  explicit Call(const AttentionConfig& c)
      : config(c),
        ropes(c, DType::kF64),
        layer(config, ropes, parameters, "", DType::kF64),
        output(DType::kF64, {kRows, c.hidden_size}) {}

  void run(const Tensor& x, Communicator* head_ranks, AttentionMode mode = AttentionMode::kSparse) {
    std::vector<std::int32_t> positions(kRows);
    std::iota(positions.begin(), positions.end(), 0);
    const RowRanges ranges = causal_ranges(kRows);
    const Rows rows = rows_of(positions, ranges);
    LayerOptions options;
    options.mode = mode;
    options.index_loss = options.index_gradient = options.measure_selection = true;
    options.d_kl = 0.7;
    options.head_ranks = head_ranks;
    kept.cache.fit(config, DType::kF64, kRows);
    parameters.zero_grad();
    result = layer.forward(x, rows, options, kept.kept(), memory, output);
  }
};

// Which axis of a weight has heads; -1: none.
int head_axis(const std::string& name, bool mla) {
  if (name == "o_proj.weight") return 1;
  if (name == "q_b_proj.weight" || name == "kv_b_proj.weight" || name == "q_proj.weight") return 0;
  return !mla && (name == "k_proj.weight" || name == "v_proj.weight") ? 0 : -1;
}

void take_part(const Tensor& all, const Tensor& part, int axis, std::int64_t rank) {
  const std::int64_t rows = part.shape[0], columns = part.rank == 1 ? 1 : part.shape[1];
  const std::int64_t width = all.rank == 1 ? 1 : all.shape[1];
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t row = axis == 0 ? rank * rows + i : i,
                         column = axis == 1 ? rank * columns + j : j;
      part.as<double>()[i * columns + j] = all.as<double>()[row * width + column];
    }
  }
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected,
                 const std::string& what) {
  // Sums over the heads in two parts: a few roundings of numbers of this size.
  double largest = 0;
  for (const double x : expected) largest = std::max(largest, std::abs(x));
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], 1e-13 * largest) << what;
  }
}

TEST(HeadsOverRanks, TheIndexerLearnsFromAllOfThem) {
  AttentionConfig mla = model::tiny_mla();
  mla.heads = 4;
  for (const AttentionConfig& config : {mla, model::tiny_gqa()}) {
    const bool is_mla = config.kind == AttentionKind::kMla;
    Call whole(config);
    for (const auto& p : whole.parameters.all()) model::fill_normal(*p, 0.4, 5);
    ParameterList inputs;
    const Tensor& x = inputs.add("x", {kRows, config.hidden_size}, DType::kF64).value;
    model::fill_normal(*inputs.find("x"), 1, 6);
    whole.run(x, nullptr);
    run_ranks(2, [&](ThreadCommunicator& ranks) {
      AttentionConfig half = config;
      half.heads /= 2;
      if (!is_mla) half.kv_heads /= 2;
      Call part(half);
      for (const auto& p : part.parameters.all()) {
        take_part(whole.parameters.find(p->name)->value, p->value, head_axis(p->name, is_mla),
                  ranks.rank());
      }
      part.run(x, &ranks);
      EXPECT_NEAR(part.result.index_kl, whole.result.index_kl, 1e-13 * whole.result.index_kl);
      EXPECT_NEAR(part.result.attention_mass_caught, whole.result.attention_mass_caught, 1e-13);
      int compared = 0;
      for (const auto& p : part.parameters.all()) {
        if (!p->indexer) continue;
        expect_near(model::numbers(p->grad), model::numbers(whole.parameters.find(p->name)->grad),
                    p->name);
        ++compared;
      }
      EXPECT_EQ(compared, 5);
      const std::vector<double> mine = model::numbers(part.output);
      std::vector<double> sum = mine;
      comm::sum(ranks, std::span(sum));
      expect_near(sum, model::numbers(whole.output), "output");
      // By itself a part learns something else, so the sum matters.
      const double together = part.result.index_kl;
      part.run(x, nullptr);
      EXPECT_GT(std::abs(part.result.index_kl - together), 1e-3 * together);
      const std::string error =
          testing::error_of([&] { part.run(x, &ranks, AttentionMode::kWarmup); });
      EXPECT_NE(error.find("heads spread over ranks need the sparse loss"), std::string::npos);
    });
  }
}

}  // namespace
}  // namespace winnow::attention
