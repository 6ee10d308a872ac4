// Rules between options of a plan: each broken one is named with option, value and a valid neighbour,
// and following the neighbour makes it valid.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plan/check.h"
#include "plan/report.h"
#include "tests/tiny_models.h"
#include "train/config.h"
#include "winnow/error.h"

namespace winnow::plan {
namespace {

using attention::AttentionMode;
using nlohmann::json;

PlanConfig good() {
  PlanConfig c;
  c.model = model::tiny_model(model::tiny_mla());
  c.model.layers = 8;
  c.stages = {{"sparse", AttentionMode::kSparse, true}};
  c.context = 64;
  c.batch_sequences = 8;
  return c;
}

std::vector<Violation> broken(const PlanConfig& c) {
  Rules rules(Rules::Mode::kCollect);
  check(c, rules);
  return rules.violations();
}

// The only rule that a configuration breaks.
Violation only(const PlanConfig& c) {
  const std::vector<Violation> all = broken(c);
  std::string texts;
  for (const Violation& v : all) texts += v.text() + "\n";
  EXPECT_EQ(all.size(), 1u) << texts;
  return all.empty() ? Violation() : all.front();
}

TEST(PlanCheck, AGoodPlanBreaksNothing) {
  EXPECT_TRUE(broken(good()).empty());
  PlanConfig c = good();
  c.pp = 2;
  c.cp = 4;
  c.dp = 2;
  c.virtual_stages = 2;
  c.model.sharing = {2, 0};
  EXPECT_TRUE(broken(c).empty());
}

// Unpadded lengths under context parallelism.
TEST(PlanCheck, LengthsAreMultiplesOfTwiceCp) {
  PlanConfig c = good();
  c.cp = 3;
  EXPECT_EQ(only(c).text(),
            "data.context must be a multiple of 2 x plan.cp = 6, since a rank holds a chunk of "
            "either half, got 64");
  EXPECT_EQ(only(c).instead, "66");
  c.cp = 4;
  c.lengths = {24, 30, 0, 8};
  EXPECT_EQ(only(c).text(),
            "plan.lengths[1] must be padded to a multiple of 2 x plan.cp = 8, got 30");
  EXPECT_EQ(only(c).instead, "32");
  c.lengths = {32, 40};
  EXPECT_EQ(only(c).text(), "plan.lengths must fit into data.context = 64, got a sum of 72");
  c.lengths = {-8};
  EXPECT_EQ(only(c).option, "plan.lengths");
}

TEST(PlanCheck, RanksDivideTheBatch) {
  PlanConfig c = good();
  c.dp = 3;
  EXPECT_EQ(only(c).instead, "9");
  c.dp = 0;
  EXPECT_EQ(only(c).text(), "plan.dp must be from 1 to 65536, got 0");
  c = good();
  c.ep = 2;
  EXPECT_EQ(only(c).text(), "plan.ep must be 1 without plan.moe, got 2");
  c.moe = {8, 2, 0, 6, 1};
  c.dp = 4;
  EXPECT_TRUE(broken(c).empty());
  c.moe.experts = 6;
  c.ep = 4;
  EXPECT_EQ(only(c).text(), "plan.ep must divide plan.moe.experts = 6, got 4");
  EXPECT_EQ(only(c).instead, "3");
  c.moe.experts = 8;
  c.ep = 8;
  EXPECT_EQ(only(c).instead, "4");  // of dp x cp
  c.ep = 1;
  c.moe.experts_per_token = 9;
  EXPECT_EQ(only(c).instead, "8");
}

// KPool: no loss, no MXFP8, no replay, whole pools; all at once, whoever names the rule.
TEST(PlanCheck, PoolsNeedAFrozenIndexer) {
  PlanConfig c = good();
  c.model.attention.indexer.pool_size = 4;
  c.model.attention.indexer.hadamard = false;
  c.stages[0].index_loss = false;
  EXPECT_TRUE(broken(c).empty());
  json wrong = {{"model", model::write_model_config(c.model)},
                {"data", {{"context", 64}, {"batch_sequences", 8}}},
                {"recompute", {"full"}},
                {"stages",
                 {{{"name", "w"}, {"attention", "warmup"}, {"index_loss_coefficient", 1.0}},
                  {{"name", "s"}, {"attention", "sparse"}, {"index_loss_coefficient", 0.1}}}}};
  wrong["reuse_checkpoint_topk"] = true;
  wrong["model"]["attention"]["indexer"]["topk"] = 6;
  wrong["model"]["attention"]["indexer"]["index_dim"] = 32;
  wrong["model"]["attention"]["indexer"]["precision"] = "mxfp8";
  Rules rules(Rules::Mode::kCollect);
  train::read_train_config(wrong, train::Purpose::kPlan, rules);
  std::string texts;
  for (const Violation& v : rules.violations()) texts += v.text() + "; valid: " + v.instead + "\n";
  for (const char* text :
       {"attention.indexer.topk must be a multiple of attention.indexer.pool_size = 4, got 6; "
        "valid: 8",
        "attention.indexer.precision \"mxfp8\" needs pool_size 1, got 4; valid: \"full\"",
        "stages[0].attention must not be a warm-up with attention.indexer.pool_size = 4: indexers "
        "of pools do not learn, got \"warmup\"; valid: \"sparse\"",
        "stages[1].index_loss_coefficient must be 0 with attention.indexer.pool_size = 4: indexers "
        "of pools do not learn, got 0.1; valid: 0",
        "reuse_checkpoint_topk must not be combined with attention.indexer.pool_size = 4: a replay "
        "of pools selects again; valid: false"}) {
    EXPECT_NE(texts.find(text), std::string::npos) << text << " is not in\n" << texts;
  }
  Rules plan(Rules::Mode::kCollect);
  read_plan_options(json::parse(R"({"pool": {"pool_size": 4}})"), c, plan);
  ASSERT_EQ(plan.violations().size(), 1u);
  EXPECT_NE(plan.violations()[0].text().find("model.attention.indexer.pool_size"),
            std::string::npos);
}

// Per-layer graphs must not capture attention while depths share; MLP-only and whole-step graphs may.
TEST(PlanCheck, StepGraphsOfLayersMustNotCaptureSharedAttention) {
  PlanConfig c = good();
  c.model.mtp_depths = 2;
  c.model.mtp_shared_components.sparse_attention_index = true;
  c.step_graph.scope = GraphScope::kLayer;
  for (const std::vector<std::string>& modules :
       {std::vector<std::string>{}, {"attention"}, {"mlp", "attention"}}) {
    c.step_graph.modules = modules;
    EXPECT_EQ(only(c).option, "plan.step_graph");
  }
  c.step_graph.modules = {"mlp"};
  EXPECT_TRUE(broken(c).empty());
  c.step_graph = {GraphScope::kStep, {}};
  EXPECT_TRUE(broken(c).empty());
  c.step_graph = {GraphScope::kLayer, {}};
  c.model.mtp_shared_components = {};
  EXPECT_TRUE(broken(c).empty());
  c.step_graph.modules = {"atention"};
  EXPECT_EQ(only(c).instead, "attention");
}

TEST(PlanCheck, LettersOfHybridModels) {
  PlanConfig c = good();
  c.layer_pattern = "D-*-D-M-";
  EXPECT_TRUE(broken(c).empty());
  c.layer_pattern = "D-*-D-M";
  EXPECT_EQ(only(c).text(),
            "plan.layer_pattern must have a letter for each of layers = 8, got 7 letters");
  EXPECT_EQ(only(c).instead, "layers 7");
  c.layer_pattern = "D-*-D-MX";
  EXPECT_EQ(only(c).text(), "plan.layer_pattern may hold M, *, D, -, E and /, got X");
  c.layer_pattern = "*-*-*-M-";
  EXPECT_TRUE(only(c).rule.find("must hold a D") == 0);
  c.layer_pattern = "D-*-D-ME";
  EXPECT_EQ(only(c).instead, "plan.moe");
  c.layer_pattern = "D-*-D-M-";
  c.model.mtp_depths = 2;
  EXPECT_EQ(only(c).instead, "D-*-D-M-/D-");
  c.layer_pattern = "D-*-D-M-/D-";
  EXPECT_TRUE(broken(c).empty());
  c.model.mtp_shared_components.sparse_attention_index = true;
  EXPECT_EQ(only(c).option, "mtp_shared_components");
  c.model.mtp_shared_components = {};
  c.model.sharing = {4, 1};  // 1, 5, 9 compute, and D stands at 1, 5 and 9
  EXPECT_TRUE(broken(c).empty());
  c.model.sharing = {2, 2};  // 5 reuses 4, which is an MLP
  EXPECT_TRUE(only(c).rule.find("layer 5") != std::string::npos) << only(c).text();
}

TEST(PlanCheck, LayoutsAreReadWithTheRest) {
  PlanConfig c = good();
  c.pp = 2;
  c.layout = "Et*4|t*4L";
  EXPECT_TRUE(broken(c).empty());
  c.virtual_stages = 2;
  EXPECT_EQ(only(c).instead, "1");
  c.virtual_stages = 0;
  c.model.sharing = {4, 2};  // 1, 2, 6 compute
  EXPECT_EQ(only(c).instead, "Et*5|t*3L");
  c.layout = "";  // even: the same cut
  EXPECT_TRUE(only(c).rule.find("layer 5 in stage 1") != std::string::npos);
  c.layout = only(c).instead;
  EXPECT_TRUE(broken(c).empty());
}

TEST(PlanCheck, MachinesAndBudgets) {
  PlanConfig c = good();
  c.machine = "h20";
  EXPECT_EQ(only(c).instead, "h200");
  c = good();
  c.score_budget_gib = 0;
  EXPECT_EQ(only(c).instead, "2");
  c.score_budget_gib = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(only(c).option, "plan.score_budget_gib");
  c = good();
  c.efficiency = 1.5;
  EXPECT_EQ(only(c).instead, "1");
}

TEST(PlanCheck, EverythingThatIsWrongIsSaidAtOnce) {
  PlanConfig c = good();
  c.cp = 5;
  c.dp = 3;
  c.machine = "tpu";
  c.pp = 3;
  c.layout = "Et*4|t*5";
  std::string options;
  for (const Violation& v : broken(c)) {
    options += v.option + "\n";
    EXPECT_NE(v.instead, "") << v.text();
  }
  EXPECT_EQ(options,
            "data.context\ndata.batch_sequences\nplan.machine\nplan.layout\n"
            "plan.layout\nplan.layout\nplan.layout\n");
}

TEST(PlanOptions, AreReadByName) {
  Rules rules(Rules::Mode::kCollect);
  PlanConfig c = good();
  c.stages.push_back({"second", AttentionMode::kDense, false});
  read_plan_options(json::parse(R"({"pp": 2, "cp": 4, "dp": 3, "ep": 1, "virtual_stages": 2,
      "layout": "Et|tL",
      "step_graph": {"scope": "layer", "modules": ["mlp"]}, "dtype": "bf16", "stage": "second",
      "shard_optimizer": true, "score_budget_gib": 0.5, "machine": "h100", "efficiency": 0.4,
      "layer_pattern": "D-", "lengths": [3, 4],
      "moe": {"experts": 8, "experts_per_token": 2, "intermediate_size": 6},
      "mamba": {"state_dim": 16}})"),
                    c, rules);
  EXPECT_TRUE(rules.kept());
  EXPECT_EQ(c.pp * 1000 + c.cp * 100 + c.dp * 10 + c.virtual_stages, 2432);
  EXPECT_EQ(c.layout, "Et|tL");
  EXPECT_TRUE(c.shard_optimizer);
  EXPECT_EQ(c.step_graph.scope, GraphScope::kLayer);
  EXPECT_EQ(c.dtype, DType::kBF16);
  EXPECT_EQ(c.mode().name, "second");
  EXPECT_EQ(c.lengths, (std::vector<std::int64_t>{3, 4}));
  EXPECT_EQ(c.moe.experts, 8);
  EXPECT_EQ(c.mamba.state_dim, 16);

  Rules wrong(Rules::Mode::kCollect);
  read_plan_options(json::parse(R"({"pp": "two", "stage": "third", "dtype": "f16",
                      "machin": "h100", "moe": {"experts": 2}})"),
                    c, wrong);
  std::vector<std::string> texts;
  for (const Violation& v : wrong.violations()) texts.push_back(v.text());
  EXPECT_EQ(texts, (std::vector<std::string>{
                       "plan.moe.experts_per_token is required and has no default",
                       "plan.moe.intermediate_size is required and has no default",
                       "plan.stage must be the name of one of the stages, got \"third\"",
                       "plan.pp must be an integer of 64 bit, got \"two\"",
                       "plan.dtype must be one of \"f32\", \"bf16\", got \"f16\"",
                       "\"plan.machin\" is not an option; did you mean plan.machine?"}));
}

// What a stage holds is asked of its own layers: none needs to own the first one.
TEST(Plan, F13EveryStageStandsForItself) {
  PlanConfig c = good();
  c.pp = 4;
  Rules strict;
  const Plan plan = make_plan(c, check(c, strict));
  ASSERT_EQ(plan.stages.size(), 4u);
  for (std::size_t s = 1; s < 3; ++s) {  // alike but for their number
    EXPECT_EQ(plan.stages[s].flops.total(), plan.stages[1].flops.total());
    EXPECT_EQ(plan.stages[s].memory.parameters, plan.stages[1].memory.parameters);
    EXPECT_EQ(plan.stages[s].computing.size(), 2u);
  }
}

TEST(PlanPicture, EveryLayerHasACell) {
  PlanConfig c = good();
  c.model.mtp_depths = 3;
  c.model.mtp_shared_components.sparse_attention_index = true;
  c.model.sharing = {4, 1};
  c.pp = 3;
  c.layout = "Et*4|t*4|m*3L";
  Rules strict;
  const std::string svg = layout_picture(c, check(c, strict));
  const auto count = [&](const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = svg.find(part); at != std::string::npos; at = svg.find(part, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("class=\"cell computes"), 3u);  // 1, 5 and depth 0
  EXPECT_EQ(count("class=\"cell reuses"), 8u);
  EXPECT_EQ(count("class=\"cell end"), 2u);
  EXPECT_EQ(count("class=\"box\""), 3u);
  EXPECT_EQ(count("layer 7 reuses those of 5"), 1u);
  EXPECT_EQ(count("<svg"), 1u);
  EXPECT_EQ(count("</svg>"), 1u);
}

// Every rank has its part of the whole step.
TEST(Plan, StagesAddUpToTheModel) {
  PlanConfig c = good();
  c.model.mtp_depths = 2;
  c.pp = 2;
  c.cp = 4;
  c.dp = 2;
  Rules strict;
  const Plan plan = make_plan(c, check(c, strict));
  EXPECT_EQ(plan.ranks, 16);
  EXPECT_EQ(plan.tokens, 8 * 64);
  Pairs pairs = exact_pairs(std::vector<std::int64_t>(8, 64), c.model.attention.indexer);
  EXPECT_NEAR(plan.flops.total() / model_flops(c, 8 * 64, pairs).total(), 1, 1e-12);
  EXPECT_NEAR(plan.mean_flops / plan.flops.total(), 1, 0.1);
  EXPECT_GT(plan.rank_memory[0], 0);
  EXPECT_NEAR(plan.idle, 1.0 / 5, 1e-12);  // four micro-batches on two ranks
}

}  // namespace
}  // namespace winnow::plan
