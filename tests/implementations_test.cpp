// Who runs an operation: lists, refusals, pins, prohibitions, what is said of it.
#include "winnow/implementations.h"

#include <gtest/gtest.h>

#include "base/run_first.h"
#include "bench/allocations.h"
#include "bench/case.h"
#include "bench/guarded.h"
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
            "[polish] it is pinned to faster, which this build does not have; it has fast, plain");
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

TEST_F(Implementations, APinAndAProhibitionCostNoAllocation) {
  pin_implementation(kName, "plain");
  forbid_implementation("*", "an implementation with a long name");
  const std::int64_t before = bench::allocations();
  char memory[64];
  run_first(kName, list, Device{}, Args{16}, {memory, sizeof memory});
  EXPECT_EQ(bench::allocations() - before, 0);
  allow_implementation("*", "an implementation with a long name");
}

TEST_F(Implementations, WhatIsInForceCanBeAsked) {
  forbid_implementation(kName, "fast");
  const auto forbidden = forbidden_implementations();
  EXPECT_EQ(forbidden, (std::vector<std::pair<std::string, std::string>>{{kName, "fast"}}));
}

// Contract 17: a call that has shapes and no data is answered as the same call with data, by every
// operation, for every problem of the shared lists.
TEST_F(Implementations, EveryProblemIsAnsweredBeforeMemoryExists) {
  for (const bench::Operation& operation : bench::operations()) {
    for (const std::string& text : operation.check_problems) {
      const bench::Problem problem = bench::Problem::parse(text);
      const auto shapes = bench::make_shapes(problem), memory = bench::make_case(problem);
      for (const Tensor& t : memory->outputs()) EXPECT_NE(t.data, nullptr) << text;
      if (shapes->parts().empty()) {  // a model is not there at all
        for (const Tensor& t : shapes->outputs()) EXPECT_EQ(t.data, nullptr) << text;
      }
      const Explanation without = shapes->explain(), with = memory->explain();
      ASSERT_EQ(without.verdicts.size(), with.verdicts.size()) << text;
      for (std::size_t n = 0; n < with.verdicts.size(); ++n) {
        const std::string& name = with.verdicts[n].implementation;
        EXPECT_EQ(without.verdicts[n].implementation, name) << text;
        EXPECT_EQ(without.verdicts[n].refusal, with.verdicts[n].refusal) << text << ": " << name;
        if (!with.verdicts[n].refusal.empty()) continue;
        const bench::PinGuard pin(operation.name, name);
        EXPECT_EQ(shapes->workspace_bytes(), memory->workspace_bytes()) << text << ": " << name;
      }
      EXPECT_EQ(shapes->tensor_bytes().inputs, memory->tensor_bytes().inputs) << text;
      EXPECT_EQ(shapes->tensor_bytes().outputs, memory->tensor_bytes().outputs) << text;
    }
  }
}

// Contract 18: who ran is who was chosen, whoever is pinned, on every operation.
TEST_F(Implementations, TheLastIsTheOneThatTheExplanationChose) {
  for (const bench::Operation& operation : bench::operations()) {
    const auto c = bench::make_case(bench::Problem::parse(operation.check_problems.at(0)));
    auto run = [&](const std::string& chosen) {
      const bench::Guarded workspace(DType::kU8, {c->workspace_bytes()});
      c->run({workspace.view().data, workspace.view().elements()});
      EXPECT_EQ(last_implementation(operation.name), chosen);
    };
    const Explanation all = c->explain();
    run(all.chosen());
    for (const Verdict& v : all.verdicts) {
      if (!v.refusal.empty() || !c->parts().empty()) continue;
      const bench::PinGuard pin(operation.name, v.implementation);
      EXPECT_EQ(c->explain().chosen(), v.implementation);
      run(v.implementation);
    }
  }
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
