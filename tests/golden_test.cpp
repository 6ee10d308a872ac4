// Golden vectors of another implementation, and that the comparison can fail.
#include "apps/winnow/golden.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
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
  void SetUp() override {
    fs::create_directories(folder / "ops");
    fs::create_directories(folder / "kpool");
  }
  void TearDown() override { fs::remove_all(folder); }

  // A case with one tensor changed by `change`.
  void copy_changed(const std::string& name, const std::function<void(const Tensor&)>& change,
                    const std::string& path = "ops/causal.safetensors") {
    const model::SafetensorsFile file(kGolden / path);
    std::vector<Array> arrays;
    std::vector<model::NamedTensor> tensors;
    for (const model::SafetensorsEntry& entry : file.entries()) {
      arrays.push_back(file.read(entry.name));
      if (entry.name == name) change(arrays.back());
      tensors.push_back({entry.name, arrays.back()});
    }
    model::write_safetensors(folder / path, tensors, file.metadata());
  }

  std::set<std::string> failing_operations() const {
    std::set<std::string> operations;
    for (const GoldenResult& g : check_golden(find_golden(folder)).results) {
      if (!g.result.failure.empty()) operations.insert(g.operation);
    }
    return operations;
  }
};

TEST_F(Golden, EveryOperationMatches) {
  const GoldenReport report = check_golden(find_golden(kGolden));
  std::set<std::string> operations;
  for (const GoldenResult& g : report.results) {
    EXPECT_EQ(g.result.failure, "")
        << g.result.problem << " " << g.operation << " by " << g.result.implementation;
    operations.insert(g.operation);
  }
  EXPECT_EQ(operations,
            (std::set<std::string>{"index_scores", "index_topk", "select_topk", "sparse_attention",
                                   "sparse_attention_backward", "index_scores_at_backward",
                                   "index_loss", "dense_index_loss", "pool_keys", "append_pools",
                                   "expand_pools", "context_parallel", "index_sharing"}));
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
  const GoldenReport report = check_golden(find_golden(folder));
  ASSERT_EQ(report.results.size(), 1u);
  EXPECT_NE(report.results[0].result.failure, "");
  EXPECT_EQ(report.results[0].result.problem, "ops/packed.safetensors");
}

constexpr char kPadded[] = "kpool/left_padding.safetensors";

TEST_F(Golden, ASmallFaultOfAPooledKeyIsSeen) {
  copy_changed(
      "pool_keys", [](const Tensor& t) { t.as<float>()[5] *= 1 + 0x1p-16f; }, kPadded);
  EXPECT_EQ(failing_operations(), (std::set<std::string>{"append_pools", "pool_keys"}));
}

// One number off in each kind of list.
TEST_F(Golden, AWrongLayoutIsSeen) {
  const std::pair<const char*, const char*> cases[] = {
      {"/zigzag/2/positions/1/3", "context_parallel"},
      {"/zigzag/1/key_reorder/5", "context_parallel"},
      {"/packed/3/query_positions/1/20", "context_parallel"},  // of padding
      {"/packed/7/key_reorder/0", "context_parallel"},
      {"/index_share/9/source/17", "index_sharing"}};
  for (const auto& [pointer, operation] : cases) {
    nlohmann::json file = nlohmann::json::parse(std::ifstream(kGolden / "layouts.json"));
    nlohmann::json& number = file.at(nlohmann::json::json_pointer(pointer));
    number = number.get<int>() + 1;
    std::ofstream(folder / "layouts.json") << file;
    EXPECT_EQ(failing_operations(), std::set<std::string>{operation}) << pointer;
  }
  std::ofstream(folder / "layouts.json") << "{\"zigzag\": [{\"seq_len\": 8, \"cp_size\": 0}]}";
  EXPECT_EQ(failing_operations(), std::set<std::string>{"(reading)"});
}

// Numbers of pools that are not whole are nobody's.
TEST_F(Golden, AnInvalidPoolIsIgnored) {
  copy_changed(
      "pool_keys", [](const Tensor& t) { t.as<float>()[t.elements() - 1] = NAN; }, kPadded);
  EXPECT_EQ(failing_operations(), std::set<std::string>{});
}

TEST_F(Golden, AnotherPoolGridIsSeen) {
  copy_changed(
      "valid", [](const Tensor& t) { t.as<std::uint8_t>()[t.shape[1] + 3] = 0; }, kPadded);
  const std::set<std::string> operations = failing_operations();
  EXPECT_TRUE(operations.contains("pool_keys"));
  EXPECT_TRUE(operations.contains("expand_pools"));
}

TEST_F(Golden, AWrongPoolIsSeen) {
  copy_changed(
      "topk_indices",
      [](const Tensor& t) {  // the last row's pools are sorted by score: another one for the first
        std::int32_t* row = t.as<std::int32_t>() + t.elements() - t.shape[2];
        std::set<std::int32_t> members(row, row + t.shape[2]);
        std::int32_t base = 17;
        while (members.contains(base)) base += 4;
        for (std::int32_t n = 0; n < 4; ++n) row[n] = base + n;
      },
      kPadded);
  EXPECT_EQ(failing_operations(), std::set<std::string>{"index_topk"});
}

TEST_F(Golden, AWrongTailIsSeen) {
  copy_changed(
      "topk_indices",
      [](const Tensor& t) { t.as<std::int32_t>()[t.elements() - t.shape[2] + 16] = -1; }, kPadded);
  EXPECT_EQ(failing_operations(), std::set<std::string>{"expand_pools"});
}

TEST_F(Golden, ADamagedPoolFileIsAFailureThatNamesIt) {
  const auto only_failure = [&] {
    const GoldenReport report = check_golden(find_golden(folder));
    EXPECT_EQ(report.results.size(), 1u);
    EXPECT_EQ(report.results[0].result.problem, "kpool/tail.safetensors");
    return report.results[0].result.failure;
  };
  fs::copy_file(kGolden / "kpool/tail.safetensors", folder / "kpool/tail.safetensors");
  fs::resize_file(folder / "kpool/tail.safetensors", 4000);
  EXPECT_NE(only_failure(), "");
  // A mask with a gap has no pools of its own.
  copy_changed(
      "valid", [](const Tensor& t) { t.as<std::uint8_t>()[20] = 0; }, "kpool/tail.safetensors");
  EXPECT_NE(only_failure().find("one valid span"), std::string::npos);
}

TEST_F(Golden, WhatThisVersionDoesNotCoverIsNamed) {
  fs::create_directories(folder / "models/tiny");
  std::ofstream(folder / "models/tiny/expected.safetensors") << "unread";
  const GoldenReport report = check_golden(find_golden(folder));
  ASSERT_EQ(report.skipped.size(), 1u);
  EXPECT_EQ(report.skipped[0].rfind("models/tiny/expected.safetensors: ", 0), 0u);
}

TEST_F(Golden, NothingToCompareIsAnError) {
  EXPECT_THROW(check_golden(find_golden(folder)), Error);  // an empty ops/
  EXPECT_THROW(check_golden(find_golden(folder / "missing")), Error);
}

}  // namespace
}  // namespace winnow::app
