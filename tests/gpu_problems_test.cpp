// Every GPU implementation of every operation against the double reference, over the shared problem
// list. Skips where there is no GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bench/case.h"
#include "winnow/device.h"

namespace winnow::bench {
namespace {

class GpuProblems : public testing::TestWithParam<std::string> {};

TEST_P(GpuProblems, MatchTheReference) {
  if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal();
  const std::vector<CheckResult> results = check_problem(GetParam(), {Device::Kind::kCuda, 0});
  if (results.empty()) GTEST_SKIP() << "no GPU implementation takes " << GetParam();
  for (const CheckResult& r : results)
    EXPECT_EQ(r.failure, "") << r.implementation << ": " << r.problem;
}

INSTANTIATE_TEST_SUITE_P(Shared, GpuProblems, testing::ValuesIn(all_check_problems()),
                         [](const auto& test) { return fmt::format("n{}", test.index); });

}  // namespace
}  // namespace winnow::bench
