// winnow demo: trains a small model on real text, compares sparse with dense attention on text it
// has not seen, lets it write, and draws what happened.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "apps/winnow/commands.h"
#include "apps/winnow/interrupt.h"
#include "base/file.h"
#include "model/generate.h"
#include "train/progress.h"
#include "train/report.h"
#include "train/trainer.h"
#include "winnow/error.h"

namespace winnow::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFooter = R"(Examples:
  winnow demo             in the folder of the sources; ./run demo builds the program first
  winnow demo --fresh     trains again, where a trained model is there already

Writes report.html and summary.json into build/demo. Ctrl-C saves; the same command goes on.)";

struct Options {
  std::string config = "examples/demo.json";
  std::string output = "build/demo";
  bool fresh = false;
  std::string prompt = "And the LORD spake unto Moses, saying,\n";
  std::int64_t bytes = 500;
};

// Goes on with a run of the same configuration and text, begins anew otherwise.
std::unique_ptr<train::Trainer> open_run(const train::TrainConfig& config, bool fresh) {
  std::vector<std::string> damaged;
  if (!fresh && train::newest_checkpoint(config.output, damaged)) {
    try {
      return std::make_unique<train::Trainer>(config, train::Begin::kResume);
    } catch (const Error& error) {
      if (error.status() == Status::kIo) throw;
      fmt::print("Beginning anew: {}\n", error.what());
    }
  }
  return std::make_unique<train::Trainer>(config, train::Begin::kOver);
}

void introduce(const train::TrainConfig& config, std::int64_t parameters) {
  const attention::IndexerConfig& indexer = config.model.attention.indexer;
  fmt::print(
      "A byte-level model of {:.2f} million parameters reads {}: {} layers, context {}, "
      "{} indexer heads, {} keys kept.\n",
      static_cast<double>(parameters) / 1e6, config.data.path, config.model.layers,
      config.data.context, indexer.index_heads, indexer.topk);
}

void train_to_the_end(train::Trainer& trainer) {
  train::Progress progress(stderr, trainer.config());
  train::Observer observer;
  observer.on_step = [&](const train::StepReport& report) { progress.step(report); };
  observer.on_message = [&](const std::string& text) { progress.message(text); };
  observer.stop = [] { return InterruptGuard::asked(); };
  const bool done = trainer.run(observer);
  progress.finish();
  if (done) return;
  throw Error(Status::kInterrupted,
              fmt::format("[demo] stopped and saved at step {}; the same command goes on",
                          trainer.state().step));
}

std::string write_text(model::Transformer& model, const Options& options) {
  std::vector<std::int32_t> prompt;
  for (char c : options.prompt) prompt.push_back(static_cast<unsigned char>(c));
  model::GenerateOptions generate;
  generate.max_tokens = options.bytes;
  generate.temperature = 0.7;
  generate.top_p = 0.95;
  std::string text;
  fmt::print("\n{}", options.prompt);
  generate.on_token = [&](std::int32_t token, std::span<const float>) {
    text += static_cast<char>(token);
    std::fputc(token, stdout);
    std::fflush(stdout);
    return !InterruptGuard::asked();
  };
  model::generate(model, prompt, generate);
  fmt::print("\n\n");
  return text;
}

void run_demo(const Options& options) {
  train::TrainConfig config = train::read_train_config_file(options.config);
  config.output = (fs::path(options.output) / "run").string();
  make_folder("demo", options.output);
  const std::unique_ptr<train::Trainer> trainer = open_run(config, options.fresh);
  model::Transformer& model = trainer->model();
  introduce(config, model.parameters().elements());
  if (trainer->state().step == train::total_steps(config)) {
    fmt::print("It is trained already (--fresh trains again).\n");
  }
  const InterruptGuard interrupt;
  train_to_the_end(*trainer);

  fmt::print("Reading the held-out text ...\n");
  std::fflush(stdout);
  const train::TextData& data = trainer->data();
  using attention::AttentionMode;
  train::Report report;
  report.config = config;
  report.parameters = model.parameters().elements();
  report.metrics = train::read_metrics(trainer->metrics_path());
  const std::int64_t windows = data.validation_windows();
  report.dense = train::evaluate(model, data, AttentionMode::kDense, windows, false);
  report.sparse = train::evaluate(model, data, AttentionMode::kSparse, windows, true);
  report.train_seconds = trainer->state().train_seconds;
  report.tokens_per_second =
      static_cast<double>(train::total_steps(config) * config.data.batch_sequences *
                          config.data.context) /
      report.train_seconds;
  report.picture = train::picture_selection(model, data, windows / 2, 32);
  fmt::print("\n{}", train::summary_table(report));
  report.prompt = options.prompt;
  report.generated_text = write_text(model, options);

  const fs::path folder = options.output;
  write_file("demo", folder / "summary.json", train::summary_json(report).dump(2) + "\n");
  write_file("demo", folder / "report.html", train::report_html(report));
  fmt::print("Pictures: {}\nNumbers: {}\nMore text: winnow generate {} --prompt \"Moses \"\n",
             (folder / "report.html").string(), (folder / "summary.json").string(), config.output);
}

}  // namespace

void add_demo(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "demo", "trains a small model, compares sparse with dense attention, lets it write");
  command->add_option("--config", options->config, "configuration (default examples/demo.json)");
  command->add_option("--output", options->output, "folder of the results (default build/demo)");
  command->add_flag("--fresh", options->fresh, "train again from the beginning");
  command->add_option("--prompt", options->prompt, "the text to go on from");
  command->add_option("--bytes", options->bytes, "bytes to write (default 500)")
      ->check(CLI::NonNegativeNumber);
  add_threads_option(*command);
  command->footer(kFooter);
  command->callback([options] { run_demo(*options); });
}

}  // namespace winnow::app
