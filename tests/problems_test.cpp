// Every implementation of every operation against the double reference, over the shared problem
// list.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bench/case.h"

namespace winnow::bench {
namespace {

class Problems : public testing::TestWithParam<std::string> {};

TEST_P(Problems, MatchTheReference) {
  const std::vector<CheckResult> results = check_problem(GetParam());
  EXPECT_FALSE(results.empty());
  for (const CheckResult& r : results)
    EXPECT_EQ(r.failure, "") << r.implementation << ": " << r.problem;
}

INSTANTIATE_TEST_SUITE_P(Shared, Problems, testing::ValuesIn(all_check_problems()),
                         [](const auto& test) { return fmt::format("n{}", test.index); });

}  // namespace
}  // namespace winnow::bench
