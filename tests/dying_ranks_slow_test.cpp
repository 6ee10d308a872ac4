// Ranks that are killed at any moment, in turn: also while a checkpoint is being written, renamed or
// removed, and while others wait for them.
#include "tests/dying_ranks.h"

namespace winnow::train {
namespace {

using nlohmann::json;

TEST_F(DyingRanks, KilledAtAnyMomentTheRunGoesOnWithTheSameCurve) {
  const std::string whole = write_config(run_of("whole", 60));
  const std::string killed = write_config(run_of("killed", 60));
  EXPECT_EQ(train(whole).status, 0);
  unsigned random = 1;
  int kills = 0;
  for (int attempt = 0; attempt < 60; ++attempt) {
    random = random * 1664525u + 1013904223u;
    const int victim = attempt % 2;
    const auto patience = std::chrono::milliseconds(100 + (random >> 20) % 1500);
    const bool resume = holds_run(folder_ / "killed");
    const Outcome end = shell(
        mpirun(fmt::format("{} train {}{}", WINNOW_PROGRAM, killed, resume ? " --resume" : "")),
        [&] {
          pid_t rank = 0;
          for (int tries = 0; tries < 500 && rank == 0; ++tries) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
            rank = find_rank(killed, victim);
          }
          std::this_thread::sleep_for(patience);
          if (rank > 0 && find_rank(killed, victim) == rank) ::kill(rank, SIGKILL);
        });
    if (end.status == 0) break;
    if (end.out.find("signal 9") != std::string::npos) {
      EXPECT_TRUE(has(end.out, fmt::format("rank {}", victim)));
      ++kills;
    }
    saved_step("killed");  // none is damaged
  }
  EXPECT_GE(kills, 3);
  EXPECT_EQ(train(killed, "--resume").status, 0);
  EXPECT_EQ(curve("killed"), curve("whole"));
  EXPECT_EQ(curve("whole").size(), 180u);
}

}  // namespace
}  // namespace winnow::train
