// N1: a shape that was never seen costs what its numbers cost and nothing else. Counted, not timed:
// while every operation runs 50 lengths for the first time, the process maps no code, starts no
// thread and starts no program.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/array.h"
#include "bench/case.h"
#include "tests/each.h"

namespace winnow::testing {
namespace {

// The pages of this process that hold code, and its threads.
std::string code_and_threads() {
  std::string all, line;
  for (std::ifstream maps("/proc/self/maps"); std::getline(maps, line);) {
    const std::size_t mode = line.find(' ');
    if (line.at(mode + 3) == 'x') all += line + "\n";
  }
  for (std::ifstream status("/proc/self/status"); std::getline(status, line);)
    if (line.rfind("Threads:", 0) == 0) all += line + "\n";
  return all;
}

// A problem of the operation in which everything but `length` is small.
std::string problem(const bench::Operation& operation, int length) {
  const std::pair<const char*, int> small[] = {{"rows", 3},    {"topk", 32},    {"index_heads", 3},
                                               {"heads", 4},   {"kv_heads", 2}, {"index_dim", 24},
                                               {"dim_qk", 24}, {"dim_v", 16},   {"requests", 3}};
  std::string text = operation.name, long_one;
  for (const char* name : {"width", "keys", "tokens", "rows", "m"}) {
    for (const bench::Parameter& p : operation.parameters)
      if (long_one.empty() && p.name == std::string(name)) long_one = name;
  }
  EXPECT_NE(long_one, "") << operation.name;
  text += " " + long_one + "=" + std::to_string(length);
  for (const auto& [name, value] : small) {
    for (const bench::Parameter& p : operation.parameters)
      if (p.name == std::string(name) && name != long_one)
        text += " " + std::string(name) + "=" + std::to_string(value);
  }
  return text;
}

TEST(UnseenShapes, N1MapNoCodeAndStartNothing) {
  const ThreadsGuard threads(3);
  const auto run = [](const bench::Operation& operation, int length) {
    const std::unique_ptr<bench::Case> c =
        operation.make(bench::Problem::parse(problem(operation, length)));
    Scratch scratch;
    c->run(scratch.get(c->workspace_bytes()));
    return c->explain().verdicts.size();
  };
  for (const bench::Operation& operation : bench::operations()) {
    if (operation.name == std::string("training_step")) continue;  // made of the others
    SCOPED_TRACE(operation.name);
    EXPECT_GE(run(operation, 64), 2u);  // threads start, once
    const std::string before = code_and_threads();
    EXPECT_NE(before.find("Threads:"), std::string::npos);
    for (int n = 0; n < 50; ++n) run(operation, 65 + 13 * n);
    EXPECT_EQ(code_and_threads(), before);
  }
  // No child was started: none has ended, and there is none to wait for.
  rusage ended = {};
  getrusage(RUSAGE_CHILDREN, &ended);
  EXPECT_EQ(ended.ru_minflt, 0);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

}  // namespace
}  // namespace winnow::testing
