// Pipeline layouts: the grammar, every rule with its words, and where index sharing may be cut.
#include "plan/pipeline_layout.h"

#include <gtest/gtest.h>

namespace winnow::plan {
namespace {

using Numbers = std::vector<std::int64_t>;

// Everything that is wrong with a layout, in one text; "" if nothing is.
std::string wrong(const std::string& text, std::int64_t ranks, std::int64_t layers,
                  std::int64_t mtp_depths = 0) {
  Rules rules(Rules::Mode::kCollect);
  parse_layout(text, ranks, layers, mtp_depths, rules);
  std::string all;
  for (const Violation& v : rules.violations()) {
    EXPECT_NE(v.instead, "") << v.text();
    all += v.text() + "\n";
  }
  return all;
}

PipelineLayout parsed(const std::string& text, std::int64_t ranks, std::int64_t layers,
                      std::int64_t mtp_depths = 0) {
  Rules strict;
  return parse_layout(text, ranks, layers, mtp_depths, strict);
}

std::string expanded(const std::string& text) {
  Rules rules(Rules::Mode::kCollect);
  const std::string letters = expand_layout(text, rules);
  return rules.kept() ? letters : "refused: " + rules.violations().front().text();
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PipelineLayout, RepetitionsAreWrittenOut) {
  EXPECT_EQ(expanded("Et*3|tL"), "Ettt|tL");
  EXPECT_EQ(expanded("E,t,|,t,L"), "Et|tL");
  EXPECT_EQ(expanded("E(t|)*3tL"), "Et|t|t|tL");
  EXPECT_EQ(expanded("E(tt|)*2(t|)*2L"), "Ett|tt|t|t|L");
  EXPECT_EQ(expanded("Et|*2tL"), "Et||tL");       // a repeated separator: an empty stage
  EXPECT_EQ(expanded("E(t*2|)*2L"), "Ett|tt|L");  // groups first, then characters
  EXPECT_EQ(expanded("Et*0|t*12L").size(), 15u);
  for (const char* text : {"E(t|)L", "E((t|)*2)*2L", "E()*2L", "E(t", "Et)L", "Et*L", "Et*-1L",
                           "Et*2*3L", "E t", "e", "*3", "E(t|)*L"}) {
    EXPECT_EQ(expanded(text).rfind("refused: plan.layout must", 0) == 0 ||
                  expanded(text).rfind("refused: plan.layout may", 0) == 0,
              true)
        << text << " " << expanded(text);
  }
  EXPECT_TRUE(has(expanded("Et*99999999999L"), "at most 65536 letters"));
  EXPECT_TRUE(has(expanded("E(t*9999|)*9999L"), "at most 65536 letters"));
  EXPECT_TRUE(has(expanded("Et*99999999999999999999999L"), "refused"));
}

TEST(PipelineLayout, StagesByRankAndVirtualStage) {
  const PipelineLayout layout = parsed("Et*2|t*3|t|t*4mL", 2, 10, 1);
  ASSERT_EQ(layout.stages.size(), 4u);
  EXPECT_EQ(layout.virtual_stages, 2);
  const Stage& third = layout.at(0, 1);
  EXPECT_EQ(third.number, 2);
  EXPECT_EQ(third.first_layer, 6);  // after two of rank 0 and three of rank 1
  EXPECT_EQ(third.layers, 1);
  EXPECT_TRUE(layout.at(0, 0).embedding);
  EXPECT_FALSE(layout.at(0, 1).embedding);
  EXPECT_EQ(layout.at(1, 0).first_layer, 3);
  EXPECT_EQ(layout.at(1, 1).first_layer, 7);
  EXPECT_EQ(layout.at(1, 1).mtp_depths, 1);
  EXPECT_TRUE(layout.at(1, 1).loss);
  EXPECT_FALSE(layout.mtp_standalone());
  EXPECT_EQ(layout_text(layout), "Et*2|t*3|t|t*4mL");

  const PipelineLayout empty = parsed("E||t|L", 2, 1);  // stages may hold nothing
  EXPECT_EQ(empty.at(1, 0).layers, 0);
  EXPECT_EQ(empty.at(0, 1).first_layer, 1);
  EXPECT_EQ(layout_text(empty), "E||t|L");
}

TEST(PipelineLayout, MtpMayStandAloneOnARankBeforeTheLoss) {
  const PipelineLayout layout = parsed("Et|t|m*2|L", 4, 2, 2);
  EXPECT_TRUE(layout.mtp_standalone());
  EXPECT_TRUE(layout.stages[2].mtp_only());
  EXPECT_FALSE(parsed("Et|t|m*2L", 3, 2, 2).mtp_standalone());
}

TEST(PipelineLayout, EveryRuleHasItsWords) {
  EXPECT_TRUE(has(wrong("tE|tL", 2, 2), "must begin with the embedding E, got t"));
  EXPECT_TRUE(has(wrong("Et|Lt", 2, 2), "must end with the loss L, got t"));
  EXPECT_TRUE(has(wrong("EEt|tL", 2, 2), "exactly one E, got 2"));
  EXPECT_TRUE(has(wrong("Et|tLL", 2, 2), "exactly one L, got 2"));
  EXPECT_TRUE(has(wrong("t|t", 2, 2), "exactly one E, got 0"));
  EXPECT_TRUE(has(wrong("Et|tL", 2, 3), "one t for each of layers = 3, got 2"));
  EXPECT_TRUE(has(wrong("Et|tL", 2, 2, 1), "one m for each of mtp_depths = 1, got 0"));
  EXPECT_TRUE(has(wrong("Et|tmL", 2, 2, 0), "one m for each of mtp_depths = 0, got 1"));
  EXPECT_TRUE(has(wrong("Et|mtL", 2, 2, 1), "no decoder layer t after"));
  EXPECT_TRUE(
      has(wrong("Et|tm|m|L", 4, 2, 2), "all depths of multi-token prediction in one stage"));
  EXPECT_TRUE(
      has(wrong("Et|t|tL", 2, 3), "a number of stages that plan.pp = 2 divides, got 3 stages"));
  // On rank 1 of two, in its first of two virtual stages; and on the first rank.
  EXPECT_TRUE(has(wrong("Et|m||L", 2, 1, 1), "in the last virtual stage of its rank, got stage 1"));
  EXPECT_TRUE(has(wrong("Etm|||L", 2, 1, 1), "never on the first rank"));
  EXPECT_EQ(wrong("EtmL", 1, 1, 1), "");  // one rank holds everything
  // Three rules at once.
  const std::string all = wrong("tE|t|L", 2, 5);
  EXPECT_TRUE(has(all, "begin with") && has(all, "for each of layers") && has(all, "plan.pp = 2"));
}

std::string orphans(const std::string& text, std::int64_t ranks, const IndexSharing& sharing,
                    std::int64_t layers, std::int64_t mtp_depths, std::string* instead = nullptr,
                    const std::function<bool(std::int64_t)>& is_dsa = {}) {
  Rules rules(Rules::Mode::kCollect);
  check_index_sharing(parsed(text, ranks, layers, mtp_depths), sharing, layers, rules, is_dsa);
  std::string all;
  for (const Violation& v : rules.violations()) all += v.text() + "\n";
  if (instead != nullptr && !rules.kept()) *instead = rules.violations().front().instead;
  return all;
}

// 78 layers, 7 depths, offset 3, frequency 4: the layers 1, 2, 3, 7, 11, ..., 75, 79 compute.
TEST(PipelineLayout, StagesBeginOnLayersThatCompute) {
  const IndexSharing sharing{4, 3};
  const std::string eight = "Et*10|t*12|t*12|t*12|t*12|t*12|t*8|m*7L";
  EXPECT_EQ(orphans(eight, 8, sharing, 78, 7), "");
  Numbers begins;
  for (const Stage& stage : parsed(eight, 8, 78, 7).stages) {
    if (stage.layers > 0) begins.push_back(stage.first_layer);
  }
  EXPECT_EQ(begins, (Numbers{1, 11, 23, 35, 47, 59, 71}));
  EXPECT_EQ(orphans("Et*22|t*24|t*24|t*8m*7L", 4, sharing, 78, 7), "");
  EXPECT_EQ(orphans("Et*18|t*24|t*24|t*12m*7L", 4, sharing, 78, 7), "");

  std::string instead;
  const std::string text = orphans("Et*17|t*24|t*24|t*13m*7L", 4, sharing, 78, 7, &instead);
  EXPECT_TRUE(has(text, "layer 18 in stage 1 (rank 1, virtual stage 0)")) << text;
  EXPECT_TRUE(has(text, "reuses the indices of layer 15, which lies in another")) << text;
  EXPECT_TRUE(has(text, "layer 42 in stage 2") && has(text, "layer 66 in stage 3"));
  EXPECT_EQ(instead, "Et*18|t*24|t*24|t*12m*7L");
  EXPECT_EQ(orphans(instead, 4, sharing, 78, 7), "");
  // Every layer computes: any cut is right.
  EXPECT_EQ(orphans("Et*17|t*24|t*24|t*13m*7L", 4, {1, 0}, 78, 7), "");
}

// In the order of execution, which goes through the ranks before the next virtual stage.
TEST(PipelineLayout, VirtualStagesAreCutByTheSameRule) {
  const IndexSharing sharing{4, 1};
  EXPECT_EQ(orphans("Et*4|t*4|t*4|t*4L", 2, sharing, 16, 0), "");
  EXPECT_TRUE(has(orphans("Et*4|t*5|t*3|t*4L", 2, sharing, 16, 0),
                  "layer 10 in stage 2 (rank 0, virtual stage 1)"));
  EXPECT_EQ(orphans("Et*4||t*4|L", 2, sharing, 8, 0), "");  // empty stages need nothing
  EXPECT_TRUE(has(orphans("Et|t*3L", 2, sharing, 4, 0), "layer 2 in stage 1"));
}

TEST(PipelineLayout, MtpOnlyStagesNeedALayerThatComputes) {
  EXPECT_EQ(orphans("Et*4|mL", 2, {4, 1}, 4, 1), "");  // layer 5 computes
  std::string instead;
  const std::string text = orphans("Et*3|mL", 2, {4, 1}, 3, 1, &instead);  // layer 4 reuses 1
  EXPECT_TRUE(has(text, "layer 4 (multi-token prediction) in stage 1")) << text;
  EXPECT_TRUE(has(text, "layer 1, which lies in another")) << text;
  EXPECT_EQ(instead, "topk_freq 1");                  // no cut of these stages helps
  EXPECT_EQ(orphans("Et*3mL", 1, {4, 1}, 3, 1), "");  // its source is in the stage
}

// A hybrid model: the source of a DSA layer must be a DSA layer.
TEST(PipelineLayout, SourcesOfHybridModelsAreDsaLayers) {
  const auto even = [](std::int64_t layer) { return layer % 2 == 0; };
  EXPECT_EQ(orphans("Et*8L", 1, {4, 2}, 8, 0, nullptr, even), "");  // 2, 6 compute; 4, 8 reuse
  EXPECT_TRUE(has(orphans("Et*8L", 1, {4, 1}, 8, 0, nullptr, even),
                  "layer 2 in stage 0 (rank 0, virtual stage 0) without its source: it reuses the "
                  "indices of layer 1, which is no DSA layer"));
}

TEST(PipelineLayout, EvenLayoutsHoldEveryLayer) {
  EXPECT_EQ(layout_text(even_layout(4, 1, 10, 2)), "Et*3|t*3|t*2|t*2m*2L");
  EXPECT_EQ(layout_text(even_layout(1, 1, 2, 0)), "Et*2L");
  EXPECT_EQ(layout_text(even_layout(2, 2, 2, 0)), "Et|t||L");
  const std::string text = layout_text(even_layout(3, 2, 17, 1));
  EXPECT_EQ(wrong(text, 3, 17, 1), "");
}

}  // namespace
}  // namespace winnow::plan
