// Runs of the program under mpirun, and what becomes of them.
#pragma once

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>

#include "tests/train_fixture.h"

namespace winnow::train {

struct Outcome {
  int status = 0;
  std::string out;  // standard output and standard error
};

// A command in a shell; while it runs, `meanwhile` may look on.
inline Outcome shell(const std::string& command, const std::function<void()>& meanwhile = {}) {
  std::FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  if (meanwhile) meanwhile();
  Outcome outcome;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
    outcome.out += static_cast<char>(c);
  }
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

// The process of a rank in whose environment and command line these texts stand; 0: there is none.
inline pid_t find_rank(const std::string& config, int rank) {
  const std::string wanted = fmt::format("OMPI_COMM_WORLD_RANK={}", rank);
  const auto content = [](const std::filesystem::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(stream), {}) + '\0';
  };
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (content(entry.path() / "cmdline").find(config) == std::string::npos) continue;
    if (content(entry.path() / "environ").find(wanted + '\0') == std::string::npos) continue;
    return static_cast<pid_t>(std::stol(name));
  }
  return 0;
}

class DyingRanks : public TrainTest {
 protected:
  // Two sequences a step for two processes, a checkpoint every two steps.
  json run_of(const std::string& output, std::int64_t steps) const {
    json config = tiny_run(text_, folder_ / output);
    for (json& stage : config["stages"]) stage["steps"] = steps;
    config["checkpoint_every"] = 2;
    return config;
  }
  std::string write_config(const json& config) const {
    return write(
        std::filesystem::path(config["output"].get<std::string>()).filename().string() + ".json",
        config.dump());
  }
  static std::string mpirun(const std::string& program) {
    return fmt::format("WINNOW_NUM_THREADS=1 {} -n 2 {}", WINNOW_MPIRUN, program);
  }
  static Outcome train(const std::string& config, const std::string& more = "") {
    return shell(mpirun(fmt::format("{} train {} {}", WINNOW_PROGRAM, config, more)));
  }
  static Outcome dying_run(const std::string& config, const std::string& how) {
    return shell(mpirun(fmt::format("{} {} {}", WINNOW_DYING_RUN, config, how)));
  }
  std::int64_t saved_step(const std::string& output) const {
    std::vector<std::string> damaged;
    const auto newest = newest_checkpoint(folder_ / output, damaged);
    EXPECT_EQ(damaged, std::vector<std::string>());
    return newest ? newest->state.step : 0;
  }
};

}  // namespace winnow::train
