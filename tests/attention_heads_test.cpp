// Attention with every number of heads from 1 to 128, forward and backward, every implementation
// against the reference: tiles of heads of every size and remainder.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bench/case.h"

namespace winnow::bench {
namespace {

class Heads : public testing::TestWithParam<int> {};

TEST_P(Heads, MatchTheReference) {
  for (const char* operation : {"sparse_attention", "sparse_attention_backward"}) {
    for (const char* rest : {"topk=21 ids=scattered", "topk=0 range=causal"}) {
      if (GetParam() % 5 != 0 && rest[5] == '0') continue;  // without lists: runs of rows, some
      const std::string problem = fmt::format("{} rows=2 keys=24 heads={} dim_qk=7 dim_v=5 {}",
                                              operation, GetParam(), rest);
      for (const CheckResult& r : check_problem(problem))
        EXPECT_EQ(r.failure, "") << r.implementation << ": " << r.problem;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(From1To128, Heads, testing::Range(1, 129));

}  // namespace
}  // namespace winnow::bench
