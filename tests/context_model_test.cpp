// Context parallelism of whole models, on ranks that are threads: the same selections and forward
// bits as on one rank, the same losses and gradients, for every model, mode and number of ranks.
#include <gtest/gtest.h>

#include "tests/context_cases.h"
#include "tests/gradient.h"
#include "tests/thread_ranks.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;
using testing::error_of;
using testing::run_ranks;
using testing::ThreadCommunicator;

std::vector<std::pair<std::string, ModelConfig>> models() {
  std::vector<std::pair<std::string, ModelConfig>> all = tiny_models();
  for (const auto& model : mtp_models()) all.push_back(model);
  ModelConfig deep = tiny_model(tiny_gqa());
  deep.layers = 4;
  deep.sharing = {3, 2};  // layers 1, 2 and 5 compute
  all.emplace_back("gqa_shared", deep);
  return all;
}

ModelConfig mxfp8_model() {
  ModelConfig c = tiny_model(tiny_mla());
  c.attention.indexer.index_dim = 32;
  c.attention.indexer.precision = attention::SelectionPrecision::kMxfp8;
  return c;
}

ContextOutcome run_on(std::int64_t ranks, const ModelConfig& config, DType dtype,
                      const Batch& batch, const StepOptions& options, std::int64_t local_rows = 0) {
  ContextOutcome outcome;
  run_ranks(ranks, [&](ThreadCommunicator& group) {
    Transformer model = shaken_model(config, dtype);
    const ContextOutcome o = run_shared(model, batch, options, group, local_rows);
    if (group.rank() == 0) outcome = o;
  });
  return outcome;
}

void expect_same_on_all(const std::string& name, const ModelConfig& config, DType dtype,
                        const Batch& batch, const StepOptions& options) {
  const ContextOutcome alone = run_alone(config, dtype, batch, options);
  for (const std::int64_t ranks : {1, 2, 4, 8}) {
    SCOPED_TRACE(fmt::format("{} {} on {} ranks", name, dtype_name(dtype), ranks));
    if (ranks == 1) {  // not a bit differs
      run_ranks(1, [&](ThreadCommunicator& group) {
        Transformer model = shaken_model(config, dtype);
        const Batch mine = share_batch(batch, group);
        EXPECT_EQ(mine.context, nullptr);
        model.step(mine, options);
        EXPECT_EQ(gradients_of(model), alone.gradients);
        EXPECT_EQ(group.exchanges, 0);
      });
      continue;
    }
    expect_same(run_on(ranks, config, dtype, batch, options), alone, dtype);
  }
}

// F14, F17: sequences of any length, an empty one and one shorter than there are ranks among them.
TEST(ContextParallel, F14F17SelectionsBitsAndGradientsAreThoseOfOneRank) {
  for (const auto& [name, config] : models()) {
    const Batch batch = packed_batch({14, 0, 3, 21}, config.vocab_size, 5);
    for (const AttentionMode mode :
         {AttentionMode::kDense, AttentionMode::kWarmup, AttentionMode::kSparse}) {
      const StepOptions options = context_options(config, mode);
      for (const DType dtype : {DType::kF64, DType::kF32}) {
        expect_same_on_all(name, config, dtype, batch, options);
      }
    }
  }
}

TEST(ContextParallel, SelectsInMxfp8AsOneRankDoes) {
  const ModelConfig config = mxfp8_model();
  const Batch batch = packed_batch({30, 17}, config.vocab_size, 6);
  for (const double index_scale : {1.3, 0.0}) {  // learning, and frozen
    StepOptions options = context_options(config, AttentionMode::kSparse);
    options.index_loss_scale = index_scale;
    expect_same_on_all("mxfp8", config, DType::kF32, batch, options);
  }
}

// The bits of a run depend on the number of ranks alone.
TEST(ContextParallel, IsBitForBitRepeatable) {
  const ModelConfig config = mtp_models()[4].second;
  const Batch batch = packed_batch({14, 9}, config.vocab_size, 5);
  const StepOptions options = context_options(config, AttentionMode::kSparse);
  const ContextOutcome once = run_on(4, config, DType::kF32, batch, options);
  const ContextOutcome again = run_on(4, config, DType::kF32, batch, options);
  EXPECT_EQ(again.gradients, once.gradients);
  EXPECT_EQ(again.result.nll, once.result.nll);
  EXPECT_EQ(again.result.index_kl, once.result.index_kl);
}

}  // namespace
}  // namespace winnow::model
