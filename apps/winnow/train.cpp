// winnow train: runs a configuration to its end, or until Ctrl-C, and saves.
#include <fmt/format.h>

#include "apps/winnow/commands.h"
#include "apps/winnow/interrupt.h"
#include "train/progress.h"
#include "train/trainer.h"
#include "winnow/error.h"

namespace winnow::app {
namespace {

constexpr const char* kFooter = R"(Examples:
  winnow train examples/demo.json              begin
  winnow train examples/demo.json --resume     go on after Ctrl-C, a kill or a power cut

The configuration is JSON; examples/demo.json shows every part of it. Its stages are DeepSeek's recipe:
dense training, warm-up of the indexers, sparse training. The output folder gets metrics.jsonl (a line
a step) and checkpoints/ (the newest two).)";

struct Options {
  std::string config;
  bool resume = false;
};

void run_train(const Options& options) {
  train::Trainer trainer(train::read_train_config_file(options.config),
                         options.resume ? train::Begin::kResume : train::Begin::kNew);
  train::Progress progress(stderr, trainer.config());
  const InterruptGuard interrupt;
  train::Observer observer;
  observer.on_step = [&](const train::StepReport& report) { progress.step(report); };
  observer.on_message = [&](const std::string& text) { progress.message(text); };
  observer.stop = [] { return InterruptGuard::asked(); };
  const bool done = trainer.run(observer);
  progress.finish();
  if (!done) {
    throw Error(Status::kInterrupted,
                fmt::format("[train] stopped and saved at step {}; to go on: winnow train {} "
                            "--resume",
                            trainer.state().step, options.config));
  }
  fmt::print(
      "trained {} steps in {}; the model is in {}\nlet it write: winnow generate {} "
      "--prompt \"In the beginning\"\n",
      trainer.state().step, train::duration_text(trainer.state().train_seconds),
      trainer.config().output, trainer.config().output);
}

}  // namespace

void add_train(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("train", "trains a model from a JSON configuration");
  command->add_option("config", options->config, "configuration file")->required();
  command->add_flag("--resume", options->resume, "go on from the newest checkpoint");
  add_threads_option(*command);
  command->footer(kFooter);
  command->callback([options] { run_train(*options); });
}

}  // namespace winnow::app
