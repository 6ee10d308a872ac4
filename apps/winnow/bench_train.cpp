// winnow bench train: what index sharing, recomputation and, on several ranks, context parallelism
// do to a training step: time, the indexer's part of it, how often an indexer selects, first and
// again in replays, and how much arithmetic that is.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "apps/winnow/commands.h"
#include "bench/training_step.h"
#include "comm/collectives.h"
#include "model/cut_batch.h"
#include "winnow/threads.h"

namespace winnow::app {
namespace {

using model::Recompute;

struct Options {
  std::int64_t layers = 8, context = 1024, topk = 128;
  int repeat = 3;
  bool json = false;
};

struct Line {
  std::string variant;
  std::int64_t topk_freq = 1, computing = 0;
  double step_ms = 0, indexer_ms = 0;  // medians
  model::IndexRuns runs;               // of one step
  std::int64_t ranks = 1;
  double flops = 0;  // counted, of all ranks
};

// On every rank of the group, between which the sequence is cut.
Line measure(const Options& options, std::string variant, std::int64_t topk_freq,
             const Recompute& recompute, Communicator& group) {
  const bench::Problem problem = bench::Problem::parse(
      fmt::format("training_step attention=sparse sequences=1 layers={} context={} topk={}",
                  options.layers, options.context, options.topk));
  model::ModelConfig config = bench::training_step_config(problem);
  config.sharing.topk_freq = topk_freq;
  model::Transformer transformer(config, DType::kF32, 1);
  const model::Batch batch = share_batch(bench::training_step_batch(problem, config), group);
  model::StepOptions step;
  step.mode = attention::AttentionMode::kSparse;
  step.loss_scale = step.index_loss_scale = 1 / static_cast<double>(options.context);
  step.recompute = recompute;

  Line line;
  line.variant = std::move(variant);
  line.topk_freq = topk_freq;
  line.ranks = group.size();
  line.computing = static_cast<std::int64_t>(model::index_layers(config).size());
  std::vector<double> steps, indexers;
  using Clock = std::chrono::steady_clock;
  for (int run = -1; run < options.repeat; ++run) {  // the first brings memory and caches
    transformer.parameters().zero_grad();
    group.barrier();
    const Clock::time_point begin = Clock::now();
    const model::StepResult result = transformer.step(batch, step);
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
    line.runs = result.index_runs;
    line.flops = result.flops;
    if (run < 0) continue;
    steps.push_back(ms);
    indexers.push_back(result.index_runs.seconds * 1e3);
  }
  const auto median = [](std::vector<double>& ms) {
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  };
  line.step_ms = median(steps);
  line.indexer_ms = median(indexers);
  comm::sum(group, std::span(&line.flops, 1));
  return line;
}

void report(const Options& options, const Line& line, const Line& base) {
  const double share = line.indexer_ms / base.indexer_ms, arithmetic = line.flops / base.flops;
  if (options.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"variant", line.variant},
                                              {"topk_freq", line.topk_freq},
                                              {"layers", options.layers},
                                              {"computing_layers", line.computing},
                                              {"context", options.context},
                                              {"topk", options.topk},
                                              {"ranks", line.ranks},
                                              {"threads", num_threads()},
                                              {"step_ms", line.step_ms},
                                              {"indexer_ms", line.indexer_ms},
                                              {"indexer_share_of_first", share},
                                              {"index_runs_forward", line.runs.forward},
                                              {"index_runs_replay", line.runs.replay},
                                              {"flops", line.flops},
                                              {"flops_share_of_first", arithmetic}}
                           .dump());
  } else {
    fmt::print("{:<40}{:>10.1f}{:>12.1f}{:>10.2f}{:>10}{:>7}{:>12.3f}\n", line.variant,
               line.step_ms, line.indexer_ms, share, line.runs.forward, line.runs.replay,
               arithmetic);
  }
  std::fflush(stdout);
}

// On one process: what sharing and recomputation do. On several: what they do together, against
// what the first of them does alone while the others wait.
int run(const Options& options, Communicator& world) {
  const bool first = world.rank() == 0;
  if (first && !options.json) {
    fmt::print("{} layers over one sequence of {} tokens, topk {}, {} thread{}\n\n", options.layers,
               options.context, options.topk, num_threads(), num_threads() == 1 ? "" : "s");
    fmt::print("{:<40}{:>10}{:>12}{:>10}{:>10}{:>7}{:>12}\n", "", "step ms", "indexer ms",
               "of first", "selects", "again", "arithmetic");
  }
  Recompute full, reuse;
  full.full = reuse.full = reuse.reuse_checkpoint_topk = true;
  const std::unique_ptr<Communicator> alone = single_communicator();
  if (world.size() > 1) {
    Line base;
    if (first) report(options, base = measure(options, "one rank", 1, {}, *alone), base);
    world.barrier();
    for (const auto& [name, recompute] :
         {std::pair{"context parallel", Recompute()}, std::pair{"recompute full", full},
          std::pair{"recompute full, reuse_checkpoint_topk", reuse}}) {
      const Line line = measure(options, name, 1, recompute, world);
      if (first) report(options, line, base);
    }
    return 0;
  }
  Line base;
  for (const std::int64_t topk_freq : {1, 2, 4}) {
    const Line line =
        measure(options, fmt::format("topk_freq {}", topk_freq), topk_freq, {}, world);
    if (topk_freq == 1) base = line;
    report(options, line, base);
  }
  report(options, measure(options, "recompute full", 1, full, world), base);
  report(options, measure(options, "recompute full, reuse_checkpoint_topk", 1, reuse, world), base);
  return 0;
}

}  // namespace

void add_bench_train(CLI::App& bench) {
  CLI::App* command =
      bench.add_subcommand("train", "a training step with index sharing and with recomputation");
  const auto options = std::make_shared<Options>();
  const auto count = [&](const char* name, std::int64_t& value, const char* text) {
    command->add_option(name, value, text)
        ->type_name("N")
        ->check(CLI::Range(1, 1 << 20).description(""))
        ->capture_default_str();
  };
  count("--layers", options->layers, "layers of the model");
  count("--context", options->context, "tokens of the step");
  count("--topk", options->topk, "keys that the indexer selects");
  command->add_option("--repeat", options->repeat, "timed steps of each line")
      ->type_name("N")
      ->check(CLI::Range(1, 1000).description(""))
      ->capture_default_str();
  command->add_flag("--json", options->json, "one JSON object per line instead of a table");
  add_threads_option(*command);
  command->footer(
      R"(Columns: ms are medians. indexer is all that indexers do in a step: projections, scores,
selection, loss and its gradient, in replays too; of first is its share of the first line's. selects
counts selections of the forward, again those of replays. arithmetic is what all ranks do together
(products, and pairs that rows look at; counted, not timed), as a share of the first line's.

Examples:
  winnow bench train
  winnow bench train --layers 16 --context 4096 --threads 1
  winnow bench train --json | jq .indexer_share_of_first
  mpirun -n 4 winnow bench train               four ranks share the context)");
  command->callback([options, command] {
    run_on_ranks(*command, [&](Communicator& world) { return run(*options, world); });
  });
}

}  // namespace winnow::app
