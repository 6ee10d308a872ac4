// Runs of several processes in which one dies: all end within seconds, the dead one is named, and the
// last checkpoint goes on with the same curve. The program itself runs here, under mpirun.
#include "tests/dying_ranks.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

TEST_F(DyingRanks, AKilledOneEndsAllAndTheRunGoesOnWithTheSameCurve) {
  json whole = run_of("whole", 30), killed = run_of("killed", 30);
  whole["checkpoint_every"] = killed["checkpoint_every"] = 10;
  const std::string config = write_config(killed);
  Clock::time_point died;
  const Outcome end = shell(mpirun(fmt::format("{} train {}", WINNOW_PROGRAM, config)), [&] {
    while (!holds_run(folder_ / "killed"))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const pid_t victim = find_rank(config, 1);
    ASSERT_GT(victim, 0);
    died = Clock::now();
    ASSERT_EQ(::kill(victim, SIGKILL), 0);
  });
  EXPECT_LT(Clock::now() - died, std::chrono::seconds(20));
  EXPECT_NE(end.status, 0);
  EXPECT_TRUE(has(end.out, "rank 1"));
  EXPECT_TRUE(has(end.out, "signal 9"));
  EXPECT_EQ(find_rank(config, 0), 0);
  EXPECT_GE(saved_step("killed"), 10);
  EXPECT_LT(saved_step("killed"), 90);
  EXPECT_EQ(train(config, "--resume").status, 0);
  EXPECT_EQ(train(write_config(whole)).status, 0);
  EXPECT_EQ(curve("killed"), curve("whole"));
  EXPECT_EQ(curve("whole").size(), 90u);
}

TEST_F(DyingRanks, AnExceptionOnOneEndsAllWithItsNameAndReason) {
  const std::string config = write_config(run_of("out", 4));
  const Outcome thrown = dying_run(config, "new throws 1 3");
  EXPECT_NE(thrown.status, 0);
  EXPECT_TRUE(has(thrown.out, "rank 1 of 2: [test] a device must answer, got silence"));
  EXPECT_EQ(saved_step("out"), 2);
  const Outcome exhausted = dying_run(config, "resume exhausts 0 5");
  EXPECT_NE(exhausted.status, 0);
  EXPECT_TRUE(has(exhausted.out, "rank 0 of 2: out of memory"));
  EXPECT_EQ(saved_step("out"), 4);
}

TEST_F(DyingRanks, KilledWhileItSavesTheFirstLeavesTheCheckpointBefore) {
  const std::string config = write_config(run_of("out", 4));
  const Outcome killed = dying_run(config, "new saving 0 7");
  EXPECT_NE(killed.status, 0);
  EXPECT_TRUE(has(killed.out, "rank 0"));
  EXPECT_EQ(saved_step("out"), 6);
  EXPECT_TRUE(fs::exists(folder_ / "out/checkpoints/.writing/model.safetensors"));
  EXPECT_EQ(dying_run(config, "resume never 0 0").status, 0);
  const std::string whole = write_config(run_of("whole", 4));
  EXPECT_EQ(dying_run(whole, "new never 0 0").status, 0);
  EXPECT_EQ(curve("out"), curve("whole"));
}

TEST_F(DyingRanks, WhatIsWrongForAllIsSaidOnce) {
  json config = run_of("out", 4);
  config["parallel"] = {{"dp", 1}};
  const Outcome few = train(write_config(config));
  EXPECT_NE(few.status, 0);
  const std::string rule = "parallel.cp x parallel.dp = 1 x 1 needs 1 processes, got 2";
  EXPECT_TRUE(has(few.out, "winnow: [train] " + rule));
  EXPECT_EQ(few.out.find(rule), few.out.rfind(rule));
  EXPECT_EQ(few.out.find("MPI_ABORT"), std::string::npos);
}

}  // namespace
}  // namespace winnow::train
