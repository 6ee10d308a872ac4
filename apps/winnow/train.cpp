// winnow train: runs a configuration to its end, or until Ctrl-C, and saves; in one process, or in as
// many as mpirun starts.
#include <fmt/format.h>

#include "apps/winnow/commands.h"
#include "apps/winnow/interrupt.h"
#include "comm/agree.h"
#include "train/progress.h"
#include "train/trainer.h"
#include "winnow/threads.h"

namespace winnow::app {
namespace {

constexpr const char* kFooter = R"(Examples:
  winnow train examples/demo.json              begin
  winnow train examples/demo.json --resume     go on after Ctrl-C, a kill or a power cut
  mpirun -n 4 winnow train examples/demo.json --cp 4
                                               four processes share the rows of each sequence; without
                                               --cp they share the sequences of each step

The configuration is JSON; examples/demo.json shows every part of it. Its stages are DeepSeek's recipe:
dense training, warm-up of the indexers, sparse training. The output folder gets metrics.jsonl (a line
a step) and checkpoints/ (the newest two).)";

struct Options {
  std::string config;
  bool resume = false;
  bool other_ranks = false;
  train::ParallelConfig parallel{0, 0};  // 0: as the configuration says
};

// "4 processes (cp 1 x dp 4) of 1 thread each", for whoever wonders where the time goes.
std::string ranks_text(const train::TrainConfig& config) {
  const train::ParallelConfig& p = config.parallel;
  return fmt::format("{} processes (cp {} x dp {}) of {} thread{} each", p.cp * p.dp, p.cp, p.dp,
                     num_threads(), num_threads() == 1 ? "" : "s");
}

train::Begin begin_of(const Options& options) {
  if (options.other_ranks) return train::Begin::kResumeOnOtherRanks;
  return options.resume ? train::Begin::kResume : train::Begin::kNew;
}

train::TrainConfig config_of(const Options& options) {
  train::TrainConfig config = train::read_train_config_file(options.config);
  if (options.parallel.cp > 0) config.parallel.cp = options.parallel.cp;
  if (options.parallel.dp > 0) config.parallel.dp = options.parallel.dp;
  return config;
}

// The command that goes on with a run.
std::string resume_text(const Communicator& world, const Options& options) {
  std::string text;
  if (world.size() > 1) text = fmt::format("mpirun -n {} ", world.size());
  text += fmt::format("winnow train {} --resume", options.config);
  if (options.parallel.cp > 0) text += fmt::format(" --cp {}", options.parallel.cp);
  if (options.parallel.dp > 0) text += fmt::format(" --dp {}", options.parallel.dp);
  return text;
}

// On every rank; the first one talks.
int train_on(Communicator& world, const Options& options) {
  train::Trainer trainer(comm::together(world, [&] { return config_of(options); }),
                         begin_of(options), world);
  const bool first = world.rank() == 0;
  train::Progress progress(stderr, trainer.config());
  const InterruptGuard interrupt;
  train::Observer observer;
  if (first) {
    observer.on_step = [&](const train::StepReport& report) { progress.step(report); };
    observer.on_message = [&](const std::string& text) { progress.message(text); };
    if (world.size() > 1) progress.message(ranks_text(trainer.config()));
  }
  observer.stop = [] { return InterruptGuard::asked(); };
  const bool done = trainer.run(observer);
  if (first) progress.finish();
  if (!done) {
    throw comm::GroupError(Status::kInterrupted,
                           fmt::format("[train] stopped and saved at step {}; to go on: {}",
                                       trainer.state().step, resume_text(world, options)));
  }
  if (first) {
    fmt::print(
        "trained {} steps in {}; the model is in {}\nlet it write: winnow generate {} "
        "--prompt \"In the beginning\"\n",
        trainer.state().step, train::duration_text(trainer.state().train_seconds),
        trainer.config().output, trainer.config().output);
  }
  return 0;
}

}  // namespace

void add_train(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("train", "trains a model from a JSON configuration");
  command->add_option("config", options->config, "configuration file")->required();
  CLI::Option* resume =
      command->add_flag("--resume", options->resume, "go on from the newest checkpoint");
  command
      ->add_flag("--other-ranks", options->other_ranks,
                 "with another number of processes than before; sums are rounded otherwise")
      ->needs(resume);
  const auto whole = CLI::Range(std::int64_t{1}, std::int64_t{1} << 30).description("");
  command
      ->add_option("--cp", options->parallel.cp,
                   "processes that share the rows of a sequence, for parallel.cp")
      ->check(whole)
      ->type_name("N");
  command
      ->add_option("--dp", options->parallel.dp,
                   "shares of a step's sequences, for parallel.dp; --cp x --dp processes")
      ->check(whole)
      ->type_name("N");
  add_threads_option(*command);
  command->footer(kFooter);
  command->callback([options, command] {
    run_on_ranks(*command, [&](Communicator& world) { return train_on(world, *options); });
  });
}

}  // namespace winnow::app
