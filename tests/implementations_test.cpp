// Who runs an operation: lists, refusals, pins, prohibitions, what is said of it.
#include "winnow/implementations.h"

#include <gtest/gtest.h>

#include "base/run_first.h"
#include "bench/case.h"
#include "winnow/log.h"

namespace winnow {
namespace {

struct Args {
  int size = 0;
};

const char* ran = "";

const Implementation<Args> fast = {
    "fast",
    [](const Args& a) -> Refusal { return a.size % 8 != 0 ? "size must be a multiple of 8" : ""; },
    [](const Args&) -> std::int64_t { return 64; }, [](const Args&, Workspace) { ran = "fast"; }};
const Implementation<Args> plain = {
    "plain", [](const Args& a) -> Refusal { return a.size < 0 ? "size must not be negative" : ""; },
    [](const Args&) -> std::int64_t { return 0; }, [](const Args&, Workspace) { ran = "plain"; }};
const Implementation<Args>* const list[] = {&fast, &plain};

constexpr const char* kName = "polish";  // an operation that only this test has

std::string run(int size) {
  char memory[64];
  ran = "nobody";
  run_first(kName, list, Device{}, Args{size}, {memory, sizeof memory});
  return ran;
}

std::string refusals(int size) {
  try {
    run(size);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::kUnsupported);
    return e.what();
  }
  return "it ran";
}

class Implementations : public testing::Test {
 protected:
  void TearDown() override {
    pin_implementation(kName, "");
    allow_implementation(kName, "fast");
    allow_implementation("*", "fast");
    set_log({});
  }
};

TEST_F(Implementations, TheFirstThatAcceptsRuns) {
  EXPECT_EQ(run(16), "fast");
  EXPECT_EQ(last_implementation(kName), "fast");
  EXPECT_EQ(run(17), "plain");
  EXPECT_EQ(last_implementation(kName), "plain");
  EXPECT_EQ(last_implementation("an operation that never ran"), "");
}

TEST_F(Implementations, AnExplanationHoldsEveryVerdict) {
  const Explanation e = explain_call(kName, list, Device{}, Args{17});
  ASSERT_EQ(e.verdicts.size(), 2u);
  EXPECT_EQ(e.verdicts[0].refusal, "size must be a multiple of 8");
  EXPECT_EQ(e.verdicts[1].refusal, "");
  EXPECT_EQ(e.chosen(), "plain");
  EXPECT_EQ(explain_call(kName, list, Device{}, Args{-1}).chosen(), "");
}

TEST_F(Implementations, NobodyAcceptsIsAnErrorWithEveryRefusal) {
  EXPECT_EQ(refusals(-1),
            "[polish] no implementation accepts this call; fast: size must be a multiple of 8; "
            "plain: size must not be negative");
}

TEST_F(Implementations, APinIsNeverPassedOver) {
  pin_implementation(kName, "plain");
  EXPECT_EQ(run(16), "plain");
  pin_implementation(kName, "fast");
  EXPECT_EQ(refusals(17),
            "[polish] no implementation accepts this call; fast: size must be a multiple of 8; "
            "plain: polish is pinned to fast");
  EXPECT_EQ(pinned_implementations().at(kName), "fast");
  pin_implementation(kName, "");
  EXPECT_EQ(run(17), "plain");
  EXPECT_FALSE(pinned_implementations().contains(kName));
}

TEST_F(Implementations, APinToNobodyIsAnError) {
  pin_implementation(kName, "faster");
  EXPECT_EQ(refusals(16),
            "[polish] no implementation accepts this call; fast: polish is pinned to faster; "
            "plain: polish is pinned to faster");
}

TEST_F(Implementations, ForbiddenUntilAllowed) {
  forbid_implementation(kName, "fast");
  EXPECT_EQ(run(16), "plain");
  EXPECT_EQ(explain_call(kName, list, Device{}, Args{16}).verdicts[0].refusal,
            "it is forbidden for polish");
  allow_implementation(kName, "fast");
  EXPECT_EQ(run(16), "fast");
  forbid_implementation("*", "fast");
  EXPECT_EQ(run(16), "plain");
  EXPECT_EQ(explain_call(kName, list, Device{}, Args{16}).verdicts[0].refusal,
            "it is forbidden for all operations");
  allow_implementation("*", "fast");
  EXPECT_EQ(run(16), "fast");
}

TEST_F(Implementations, EveryReasonIsLoggedOnce) {
  std::vector<std::string> said;
  set_log([&](const std::string& message) { said.push_back(message); });
  run(16);
  EXPECT_TRUE(said.empty());
  run(17);
  run(18);
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0], "polish: plain runs, since fast: size must be a multiple of 8");
  forbid_implementation(kName, "fast");
  run(17);
  run(16);
  ASSERT_EQ(said.size(), 2u);
  EXPECT_EQ(said[1], "polish: plain runs, since fast: it is forbidden for polish");
  set_log({});
  run(17);
  EXPECT_EQ(said.size(), 2u);
}

TEST_F(Implementations, TooLittleWorkspaceIsRefusedBeforeTheRun) {
  char memory[64];
  ran = "nobody";
  EXPECT_EQ(workspace_bytes_of(kName, list, Device{}, Args{16}), 64);
  EXPECT_EQ(workspace_bytes_of(kName, list, Device{}, Args{17}), 0);
  EXPECT_THROW(run_first(kName, list, Device{}, Args{16}, {memory, 63}), Error);
  EXPECT_THROW(run_first(kName, list, Device{}, Args{16}, {nullptr, 64}), Error);
  EXPECT_STREQ(ran, "nobody");
  run_first(kName, list, Device{}, Args{17}, {nullptr, 0});
  EXPECT_STREQ(ran, "plain");
}

TEST_F(Implementations, APinOfAScopeGivesTheUsersPinBack) {
  pin_implementation(kName, "plain");
  {
    const bench::PinGuard pin(kName, "fast");
    EXPECT_EQ(run(16), "fast");
  }
  EXPECT_EQ(run(16), "plain");
}

// Every operation's list ends in the reference, and the reference accepts f64. A training step has
// no list of its own.
TEST_F(Implementations, EveryListEndsInTheReference) {
  for (const bench::Operation& operation : bench::operations()) {
    if (operation.name == std::string("training_step")) continue;
    const Explanation e =
        operation.make(bench::Problem::parse(operation.check_problems.at(0)))->explain();
    EXPECT_EQ(e.operation, operation.name);
    ASSERT_FALSE(e.verdicts.empty()) << operation.name;
    EXPECT_EQ(e.verdicts.back().implementation, "reference") << operation.name;
    EXPECT_EQ(e.verdicts.back().refusal, "") << operation.name;
  }
}

}  // namespace
}  // namespace winnow
