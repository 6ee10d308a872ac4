// Every implementation of every operation against the double reference, over the shared problem
// list.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bench/case.h"

namespace winnow::bench {
namespace {

std::vector<std::string> all_problems() {
  std::vector<std::string> all;
  for (const Operation& operation : operations()) {
    all.insert(all.end(), operation.check_problems.begin(), operation.check_problems.end());
  }
  return all;
}

class Problems : public testing::TestWithParam<std::string> {};

TEST_P(Problems, MatchTheReference) {
  const std::vector<CheckResult> results = check_problem(GetParam());
  EXPECT_FALSE(results.empty());
  for (const CheckResult& r : results)
    EXPECT_EQ(r.failure, "") << r.implementation << ": " << r.problem;
}

INSTANTIATE_TEST_SUITE_P(Shared, Problems, testing::ValuesIn(all_problems()),
                         [](const auto& test) { return fmt::format("n{}", test.index); });

}  // namespace
}  // namespace winnow::bench
