// winnow generate: text from a checkpoint, printed as it comes.
#include "model/generate.h"

#include <fmt/format.h>

#include <cstdio>

#include "apps/winnow/commands.h"
#include "apps/winnow/interrupt.h"
#include "base/check.h"
#include "train/checkpoint.h"

namespace winnow::app {
namespace {

constexpr const char* kFooter = R"(Examples:
  winnow generate build/demo/run --prompt "And God said"
  winnow generate build/demo/run --prompt "Moses " --temperature 0.8 --top-p 0.95 --seed 3
  winnow generate build/demo/run --prompt "Moses " --dense     reads all keys, as a comparison

The checkpoint is the output folder of a run (its newest checkpoint is used) or a folder with config.json and
model.safetensors. Text is bytes; temperature 0 always takes the likeliest one.)";

struct Options {
  std::string checkpoint, prompt;
  model::GenerateOptions generate;
  bool dense = false;
};

void run_generate(Options& options) {
  WINNOW_CHECK("generate", !options.prompt.empty(),
               "--prompt must hold at least one byte, got \"\"");
  std::vector<std::string> damaged;
  const std::filesystem::path checkpoint = train::find_checkpoint(options.checkpoint, damaged);
  for (const std::string& error : damaged) {
    fmt::print(stderr, "passed over a damaged checkpoint: {}\n", error);
  }
  if (!damaged.empty()) fmt::print(stderr, "the text is of {}\n", checkpoint.string());
  model::Transformer model = train::load_model(checkpoint);
  std::vector<std::int32_t> prompt;
  for (char c : options.prompt) prompt.push_back(static_cast<unsigned char>(c));
  if (options.dense) options.generate.mode = attention::AttentionMode::kDense;

  const InterruptGuard interrupt;
  bool begun = false;  // an error in the options comes before any text
  const auto begin = [&] {
    if (!begun) std::fwrite(options.prompt.data(), 1, options.prompt.size(), stdout);
    begun = true;
  };
  options.generate.on_token = [&](std::int32_t token, std::span<const float>) {
    begin();
    std::fputc(token, stdout);
    return std::fflush(stdout) == 0 && !InterruptGuard::asked();
  };
  model::generate(model, prompt, options.generate);
  begin();
  std::fputc('\n', stdout);
}

}  // namespace

void add_generate(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("generate", "lets a trained model write");
  command->add_option("checkpoint", options->checkpoint, "a run's output folder, or a checkpoint")
      ->required();
  command->add_option("--prompt", options->prompt, "the text to go on from")->required();
  command->add_option("--max-tokens", options->generate.max_tokens, "bytes to write (default 128)");
  command->add_option("--temperature", options->generate.temperature,
                      "0: the likeliest byte each time (default); 1: as the model thinks");
  command->add_option("--top-p", options->generate.top_p,
                      "sample among the likeliest bytes of this total probability (default 1)");
  command->add_option("--seed", options->generate.seed, "of the sampling (default 1)");
  command->add_flag("--dense", options->dense, "attend to all keys instead of the selected ones");
  add_threads_option(*command);
  command->footer(kFooter);
  command->callback([options] { run_generate(*options); });
}

}  // namespace winnow::app
