// Which layers compute indices, and whose the others reuse: the schedules of public models, and the
// rule against itself.
#include "layout/index_sharing.h"

#include <gtest/gtest.h>

#include <vector>

#include "winnow/error.h"

namespace winnow {
namespace {

using Layers = std::vector<std::int64_t>;

Layers computing(const IndexSharing& sharing, std::int64_t layers) {
  Layers found;
  for (std::int64_t n = 1; n <= layers; ++n) {
    if (computes_indices(sharing, n)) found.push_back(n);
  }
  return found;
}

TEST(IndexSharing, SchedulesByOffsetAndFrequency) {
  EXPECT_EQ(computing({1, 0}, 5), (Layers{1, 2, 3, 4, 5}));
  EXPECT_EQ(computing({1, 9}, 3), (Layers{1, 2, 3}));
  EXPECT_EQ(computing({4, 0}, 13), (Layers{1, 5, 9, 13}));
  EXPECT_EQ(computing({4, 1}, 13), (Layers{1, 5, 9, 13}));
  EXPECT_EQ(computing({4, 3}, 16), (Layers{1, 2, 3, 7, 11, 15}));
  EXPECT_EQ(computing({5, 4}, 24), (Layers{1, 2, 3, 4, 9, 14, 19, 24}));
  EXPECT_EQ(computing({100, 2}, 60), (Layers{1, 2}));
  const Layers large = computing({4, 3}, 79);  // 78 layers and MTP: 21 layers and one more
  EXPECT_EQ(large.size(), 22u);
  EXPECT_EQ(large.back(), 79);
}

TEST(IndexSharing, SourcesOfReusingLayers) {
  EXPECT_EQ(index_source({4, 1}, 4), 1);
  EXPECT_EQ(index_source({4, 1}, 6), 5);
  EXPECT_EQ(index_source({4, 3}, 4), 3);
  EXPECT_EQ(index_source({4, 3}, 18), 15);
  EXPECT_EQ(index_source({4, 3}, 2), 2);
}

// The source is the last layer at or before this one that computes.
TEST(IndexSharing, TheSourceIsTheNearestComputingLayerBefore) {
  for (std::int64_t freq = 1; freq <= 7; ++freq) {
    for (std::int64_t offset = 0; offset <= 5; ++offset) {
      std::int64_t last = 0;
      for (std::int64_t layer = 1; layer <= 40; ++layer) {
        if (computes_indices({freq, offset}, layer)) last = layer;
        EXPECT_EQ(index_source({freq, offset}, layer), last) << freq << " " << offset;
      }
    }
  }
}

TEST(IndexSharing, BrokenRulesAreNamed) {
  const auto refusal = [](const IndexSharing& sharing, std::int64_t layer) -> std::string {
    try {
      index_source(sharing, layer);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal({0, 0}, 1), "[index_sharing] topk_freq must be at least 1, got 0");
  EXPECT_EQ(refusal({1, -1}, 1), "[index_sharing] skip_topk_offset must be at least 0, got -1");
  EXPECT_EQ(refusal({1, 0}, 0), "[index_sharing] layers count from 1, got 0");
}

}  // namespace
}  // namespace winnow
