// Golden vectors of another implementation, and that the comparison can fail.
#include "apps/winnow/golden.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <set>

#include "model/safetensors.h"
#include "winnow/error.h"

namespace winnow::app {
namespace {

namespace fs = std::filesystem;

const fs::path kGolden = fs::path(WINNOW_SOURCE_DIR) / "tests/golden";

class Golden : public testing::Test {
 protected:
  fs::path folder = fs::path(testing::TempDir()) / fmt::format("winnow_golden_{}", getpid());
  void SetUp() override { fs::create_directories(folder / "ops"); }
  void TearDown() override { fs::remove_all(folder); }

  // The causal case with one tensor changed by `change`.
  void copy_changed(const std::string& name, const std::function<void(const Tensor&)>& change) {
    const model::SafetensorsFile file(kGolden / "ops/causal.safetensors");
    std::vector<Array> arrays;
    std::vector<model::NamedTensor> tensors;
    for (const model::SafetensorsEntry& entry : file.entries()) {
      arrays.push_back(file.read(entry.name));
      if (entry.name == name) change(arrays.back());
      tensors.push_back({entry.name, arrays.back()});
    }
    model::write_safetensors(folder / "ops/causal.safetensors", tensors, file.metadata());
  }

  std::set<std::string> failing_operations() const {
    std::set<std::string> operations;
    for (const GoldenResult& g : check_golden(folder).results) {
      if (!g.result.failure.empty()) operations.insert(g.operation);
    }
    return operations;
  }
};

TEST_F(Golden, EveryOperationMatches) {
  const GoldenReport report = check_golden(kGolden);
  std::set<std::string> operations;
  for (const GoldenResult& g : report.results) {
    EXPECT_EQ(g.result.failure, "")
        << g.result.problem << " " << g.operation << " by " << g.result.implementation;
    operations.insert(g.operation);
  }
  EXPECT_EQ(operations,
            (std::set<std::string>{"index_scores", "index_topk", "select_topk", "sparse_attention",
                                   "sparse_attention_backward", "index_scores_at_backward",
                                   "index_loss", "dense_index_loss"}));
  EXPECT_TRUE(report.skipped.empty());
}

// One number off by a ten thousandth of the largest: each comparison must see it.
TEST_F(Golden, ASmallFaultIsSeen) {
  const std::pair<const char*, const char*> cases[] = {
      {"index_scores", "index_scores"},
      {"mla.output", "sparse_attention"},
      {"mha.output", "sparse_attention"},
      {"mla.d_key", "sparse_attention_backward"},
      {"mha.d_value", "sparse_attention_backward"},
      {"sparse_loss", "index_loss"},
      {"sparse_loss.d_index_key", "index_scores_at_backward"},
      {"dense_loss", "dense_index_loss"},
      {"dense_loss.d_index_weights", "dense_index_loss"}};
  for (const auto& [tensor, operation] : cases) {
    copy_changed(tensor, [](const Tensor& t) {
      float largest = 0;
      for (std::int64_t i = 0; i < t.elements(); ++i) {
        const float x = std::abs(t.as<float>()[i]);
        if (std::isfinite(x)) largest = std::max(largest, x);
      }
      t.as<float>()[0] += 1e-4f * largest;
    });
    EXPECT_EQ(failing_operations(), std::set<std::string>{operation}) << tensor;
  }
}

TEST_F(Golden, AWrongMemberIsSeen) {
  copy_changed("topk_indices", [](const Tensor& t) {
    std::int32_t* last_row = t.as<std::int32_t>() + t.elements() - t.shape[2];
    std::set<std::int32_t> members(last_row, last_row + t.shape[2]);
    for (std::int32_t id = 0;; ++id) {
      if (!members.contains(id)) {
        last_row[0] = id;
        return;
      }
    }
  });
  const std::set<std::string> operations = failing_operations();
  EXPECT_TRUE(operations.contains("index_topk"));
  EXPECT_TRUE(operations.contains("select_topk"));
}

TEST_F(Golden, AScoreOutsideTheRangeIsSeen) {
  copy_changed("index_scores", [](const Tensor& t) { t.as<float>()[1] = 0; });  // row 0 sees key 0
  EXPECT_EQ(failing_operations(), std::set<std::string>{"index_scores"});
}

TEST_F(Golden, ACutFileIsAFailureThatNamesIt) {
  fs::copy_file(kGolden / "ops/packed.safetensors", folder / "ops/packed.safetensors");
  fs::resize_file(folder / "ops/packed.safetensors", 4000);
  const GoldenReport report = check_golden(folder);
  ASSERT_EQ(report.results.size(), 1u);
  EXPECT_NE(report.results[0].result.failure, "");
  EXPECT_EQ(report.results[0].result.problem, "ops/packed.safetensors");
}

TEST_F(Golden, WhatThisVersionDoesNotCoverIsNamed) {
  fs::create_directories(folder / "kpool");
  std::ofstream(folder / "kpool/tail.safetensors") << "unread";
  std::ofstream(folder / "layouts.json") << "{}";
  const GoldenReport report = check_golden(folder);
  ASSERT_EQ(report.skipped.size(), 2u);
  EXPECT_EQ(report.skipped[0].rfind("kpool/tail.safetensors: ", 0), 0u);
  EXPECT_EQ(report.skipped[1].rfind("layouts.json: ", 0), 0u);
}

TEST_F(Golden, NothingToCompareIsAnError) {
  EXPECT_THROW(check_golden(folder), Error);  // an empty ops/
  EXPECT_THROW(check_golden(folder / "missing"), Error);
}

}  // namespace
}  // namespace winnow::app
