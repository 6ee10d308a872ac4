// Runs that are killed at any moment: also while a checkpoint is being written, renamed or removed.
#include <signal.h>
#include <sys/wait.h>

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/trainer.h"
#include "winnow/threads.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Kill : public FolderTest {
 protected:
  // All that metrics say but the time.
  std::vector<json> curve(const std::string& output) const {
    std::vector<json> lines = read_metrics(folder_ / output / "metrics.jsonl");
    for (json& line : lines) line.erase("timing");
    return lines;
  }
};

TEST_F(Kill, AtAnyMomentLeavesAWholeCheckpointAndTheSameCurve) {
  const std::string text = write("text.txt", tiny_text(4000));
  json config = tiny_run(text, folder_ / "whole");
  for (json& stage : config["stages"]) stage["steps"] = 12;
  set_num_threads(1);
  EXPECT_TRUE(Trainer(read_train_config(config), Begin::kNew).run({}));

  config["output"] = folder_ / "killed";
  config["checkpoint_every"] = 1;  // most of the time goes into checkpoints
  config["validate_every"] = 5;
  const TrainConfig killed = read_train_config(config);
  unsigned state = 12345;
  int kills = 0, longest = 4;  // milliseconds
  bool done = false;
  while (!done && kills < 400) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::vector<std::string> damaged;
      const bool resume = newest_checkpoint(killed.output, damaged).has_value();
      if (!damaged.empty()) ::_exit(7);
      try {
        ::_exit(Trainer(killed, resume ? Begin::kResume : Begin::kNew).run({}) ? 0 : 8);
      } catch (const std::exception& error) {
        std::fputs(error.what(), stderr);
        ::_exit(9);
      }
    }
    state = state * 1664525u + 1013904223u;
    ::usleep((state >> 8) % static_cast<unsigned>(longest * 1000));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      ASSERT_EQ(WEXITSTATUS(status), 0);
      done = true;
    } else {
      ++kills;
      longest = std::min(2000, longest + 4);  // so that it gets to the end at last
    }
    std::vector<std::string> damaged;
    newest_checkpoint(killed.output, damaged);
    ASSERT_TRUE(damaged.empty()) << damaged.front();
  }
  ASSERT_TRUE(done);
  EXPECT_GT(kills, 10);
  std::vector<json> losses;
  for (const json& line : curve("killed")) {
    if (!line.contains("validation")) losses.push_back(line);
  }
  EXPECT_EQ(losses, curve("whole"));
}

}  // namespace
}  // namespace winnow::train
