// The arithmetic that a step counts (base/arithmetic.h) is the arithmetic that a plan reckons with,
// operation for operation: two ways to the same number, one from what runs, one from formulas.
#include <gtest/gtest.h>

#include "plan/flops.h"
#include "tests/tiny_models.h"

namespace winnow::plan {
namespace {

using attention::AttentionKind;
using attention::AttentionMode;

// What one of the two leaves out, of all layers and depths: a plan counts the norms of the latents
// as Megatron Core does, and not the logits that make the indexer's target.
double left_out(const PlanConfig& c, double tokens, const Pairs& pairs) {
  const attention::AttentionConfig& a = c.model.attention;
  const bool mla = a.kind == AttentionKind::kMla;
  const bool warmup = c.mode().attention == AttentionMode::kWarmup;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  double more = 0;
  const auto add = [&](std::int64_t layer, std::int64_t depth) {
    const bool shares_keys = depth > 0 && c.model.mtp_shared_components.latent_kv;
    const std::int64_t norms = mla ? a.q_lora_rank + (shares_keys ? 0 : a.kv_lora_rank) : 0;
    more -= (warmup ? 2 : 6) * tokens * number(norms);
    if (!runs_indexer(c, layer, depth) || !c.mode().index_loss) return;
    const std::int64_t dim_qk = (mla ? a.kv_lora_rank : a.qk_nope_head_dim) + a.qk_rope_head_dim;
    more += 2 * (warmup ? pairs.visible : pairs.selected) * number(a.heads * dim_qk);
  };
  for (std::int64_t n = 1; n <= c.model.layers; ++n) add(n, 0);
  for (std::int64_t d = 0; d < depths_run(c); ++d) add(c.model.layers + 1, d);
  return more;
}

double counted(const PlanConfig& c, const model::Batch& batch) {
  model::Transformer model = model::shaken_model(c.model);
  model::StepOptions options;
  options.mode = c.mode().attention;
  options.index_loss_scale = c.mode().index_loss ? 1 : 0;
  if (c.mode().mtp_loss) {
    options.mtp_loss_scales.assign(static_cast<std::size_t>(c.model.mtp_depths), 1);
  }
  return model.step(batch, options).flops;
}

TEST(CountedFlops, AreThoseOfThePlan) {
  std::vector<std::pair<std::string, model::ModelConfig>> models = model::tiny_models();
  for (const auto& more : model::mtp_models()) models.push_back(more);
  for (const auto& more : model::pool_models()) models.push_back(more);
  const std::vector<std::int64_t> lengths = {14, 9};
  const model::Batch batch = model::packed_batch({14, 9}, 11, 5);
  for (const auto& [name, config] : models) {
    for (const AttentionMode mode : {AttentionMode::kDense, AttentionMode::kSparse}) {
      for (const bool learns : {false, true}) {
        if (learns && (mode == AttentionMode::kDense || config.attention.indexer.pools())) continue;
        PlanConfig c;
        c.model = config;
        c.context = 23;
        c.stages = {{"stage", mode, learns, config.mtp_depths > 0}};
        const Pairs pairs = exact_pairs(lengths, config.attention.indexer);
        const double planned = model_flops(c, 23, pairs).total() + left_out(c, 23, pairs);
        EXPECT_EQ(counted(c, batch), planned) << name << (learns ? " learns" : "");
      }
    }
  }
}

}  // namespace
}  // namespace winnow::plan
