// A run of several processes in which one meets its end at a moment that only code can choose:
//
//   dying_run CONFIG new|resume HOW RANK STEP
//
// After STEP steps, HOW on RANK: "throws", "exhausts" (memory), or "saving": it is killed while it
// writes the checkpoint that follows. tests/dying_ranks_test.cpp starts it.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <new>
#include <string>
#include <thread>

#include "comm/launch.h"
#include "train/trainer.h"
#include "winnow/error.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;

// Kills this process as soon as a checkpoint is half there: with its weights on the disk, and
// before it has its name.
void kill_while_saving(const fs::path& output) {
  std::thread([writing = output / "checkpoints/.writing"] {
    std::error_code error;
    while (!fs::exists(writing / "model.safetensors", error)) std::this_thread::yield();
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

int run(Communicator& world, char** argv) {
  const std::string how = argv[3];
  const std::int64_t rank = std::stol(argv[4]), step = std::stol(argv[5]);
  comm::share_threads(world);
  Trainer trainer(read_train_config_file(argv[1]),
                  std::string(argv[2]) == "resume" ? Begin::kResume : Begin::kNew, world);
  Observer observer;
  observer.on_step = [&](const StepReport& report) {
    if (report.step != step || world.rank() != rank) return;
    if (how == "throws") throw Error(Status::kDevice, "[test] a device must answer, got silence");
    if (how == "exhausts") throw std::bad_alloc();
    if (how == "saving") kill_while_saving(trainer.config().output);
  };
  return trainer.run(observer) ? 0 : 1;
}

}  // namespace
}  // namespace winnow::train

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  return winnow::comm::run_ranks(
      [&](winnow::Communicator& world) { return winnow::train::run(world, argv); },
      [](const std::string& message) { std::fprintf(stderr, "winnow: %s\n", message.c_str()); });
}
