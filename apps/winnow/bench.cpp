// winnow bench: how fast an operation is, and how far from what the machine can do.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/winnow/commands.h"
#include "base/array.h"
#include "base/check.h"
#include "base/text.h"
#include "bench/case.h"
#include "bench/placement.h"
#include "ops/machine_speed.h"
#include "winnow/threads.h"

namespace winnow::app {
namespace {

using bench::Case;
using bench::Problem;

struct Options {
  std::vector<std::string> words, operations;
  bool json = false, all = false;
  int repeat = 0;
  Device device;
};

struct Timing {
  double median_ms = 0, best_ms = 0;
  int runs = 0;
};

// Roughly what the double-precision loops of the reference do; a longer run than the limit is left
// out unless the user names the problem or the pin.
constexpr double kReferenceFlops = 3e8, kReferenceLimitSeconds = 3;

// The milliseconds of one run, by the clock of the device; the first run brings the data there.
class Stopwatch {
 public:
  explicit Stopwatch(Case& c) : case_(c) {
    const std::int64_t bytes = c.workspace_bytes();
    if (bench::Placement* placement = bench::Placement::current()) {
      device_workspace_ = bench::FencedMemory(placement->device(), bytes);
      workspace_ = {device_workspace_.data(), bytes};
      timer_.emplace(placement->device());
      placement->set_uploads(true);
      c.run(workspace_);
      placement->set_uploads(false);
    } else {
      host_workspace_ = Array(DType::kU8, {bytes});  // zeroed: its pages are there
      workspace_ = {host_workspace_.view().data, bytes};
    }
  }
  double once() {
    if (timer_) {
      timer_->start({});
      case_.run(workspace_);
      return timer_->stop_ms({});
    }
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    case_.run(workspace_);
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

 private:
  Case& case_;
  Array host_workspace_;
  bench::FencedMemory device_workspace_;
  Workspace workspace_;
  std::optional<DeviceTimer> timer_;
};

Timing time_case(Case& c, int repeat) {
  Stopwatch watch(c);
  std::vector<double> ms;
  double total = 0;
  const double first = watch.once();
  if (first > 1500 && repeat == 0) return {first, first, 1};  // nothing to warm up in a long run
  auto enough = [&] {
    const auto runs = static_cast<int>(ms.size());
    return repeat > 0 ? runs >= repeat : runs >= 3 && (total >= 400 || runs >= 1000);
  };
  while (!enough()) {
    ms.push_back(watch.once());
    total += ms.back();
  }
  std::sort(ms.begin(), ms.end());
  return {ms[ms.size() / 2], ms.front(), static_cast<int>(ms.size())};
}

constexpr std::size_t kProblemWidth = 62;  // a longer problem gets a line of its own

void print_machine(const MachineSpeed& machine, Device device) {
  if (device.kind == Device::Kind::kCpu) {
    fmt::print("machine, {} thread{}, measured now:\n", machine.threads,
               machine.threads == 1 ? "" : "s");
  } else {
    fmt::print("{}, {} multiprocessors, measured now:\n", device_text(device), machine.threads);
  }
  fmt::print("  multiply-add ({})  {:.0f} GFLOP/s\n", machine.instruction_set, machine.flops / 1e9);
  for (const MachineSpeed::Level& level : machine.levels) {
    fmt::print("  {:>8} working set  read {:.1f} GB/s, write {:.1f} GB/s\n",
               size_text(static_cast<double>(level.bytes)), level.read / 1e9, level.write / 1e9);
  }
  fmt::print("\n{:<{}} {:<14}{:>10}{:>9}{:>8}{:>7}{:>11}\n", "problem", kProblemWidth,
             "implementation", "ms", "GFLOP/s", "GB/s", "floor", "workspace");
}

void report(const Options& options, const MachineSpeed& machine, const std::string& text,
            const Problem& problem, const std::string& implementation, const Case& c,
            const Timing& timing) {
  const bench::Cost cost = c.cost();
  const double floor_ms = 1e3 * machine.floor_seconds(cost.flops, cost.bytes);
  const double gflops = cost.flops / timing.median_ms / 1e6;
  const double gbytes = cost.bytes / timing.median_ms / 1e6;
  const double share = floor_ms / timing.median_ms;
  const bool own_memory = c.keeps_own_memory() && c.workspace_bytes() == 0;  // nobody counted it
  const double tokens_per_second = 1e3 * static_cast<double>(c.tokens()) / timing.median_ms;
  if (!options.json) {
    std::string label = text;
    if (c.tokens() > 0) label += fmt::format(": {:.0f} tokens/s", tokens_per_second);
    for (const auto& [name, n] : c.counts()) label += fmt::format(": {} {}", n, name);
    if (label.size() > kProblemWidth) {
      fmt::print("{}\n", label);
      label.clear();
    }
    fmt::print("{:<{}} {:<14}{:>10.3f}{:>9.1f}{:>8.1f}{:>6.0f}%{:>11}\n", label, kProblemWidth,
               implementation, timing.median_ms, gflops, gbytes, 100 * share,
               own_memory ? "-" : size_text(static_cast<double>(c.workspace_bytes())));
  } else {
    nlohmann::ordered_json line = {
        {"operation", problem.operation()},
        {"problem", text},
        {"implementation", implementation},
        {"device", device_text(bench::current_device())},
        {"threads", num_threads()},
        {"ms", timing.median_ms},
        {"best_ms", timing.best_ms},
        {"runs", timing.runs},
        {"flops", cost.flops},
        {"bytes", cost.bytes},
        {"gflops", gflops},
        {"gbytes_per_second", gbytes},
        {"floor_ms", floor_ms},
        {"floor_share", share},
        {"workspace_bytes", own_memory ? nlohmann::ordered_json(nullptr)
                                       : nlohmann::ordered_json(c.workspace_bytes())},
        {"machine",
         {{"instruction_set", machine.instruction_set},
          {"gflops", machine.flops / 1e9},
          {"memory_read_gbytes_per_second", machine.levels.back().read / 1e9},
          {"memory_write_gbytes_per_second", machine.levels.back().write / 1e9}}}};
    if (c.tokens() > 0) line["tokens_per_second"] = tokens_per_second;
    for (const auto& [name, n] : c.counts()) line[name] = n;
    fmt::print("{}\n", line.dump());
  }
  std::fflush(stdout);
}

// One problem by whoever would run it, or by everyone who accepts it.
void bench_problem(const Options& options, const MachineSpeed& machine, const std::string& text,
                   bool named) {
  const auto placement = bench::place(options.device);
  const Problem problem = Problem::parse(text);
  const std::unique_ptr<Case> c = bench::make_case(problem);
  const Explanation explanation = c->explain();
  const std::string chosen = explanation.chosen();
  if (chosen.empty() && named) c->workspace_bytes();  // throws with every refusal
  if (chosen.empty()) fmt::print(stderr, "winnow: left out, nobody accepts: {}\n", text);
  for (const Verdict& v : explanation.verdicts) {
    if (!v.refusal.empty() || (!options.all && v.implementation != chosen)) continue;
    const double reference_seconds = c->cost().flops / kReferenceFlops;
    const bool insisted = named && v.implementation == chosen;
    if (v.implementation == "reference" && reference_seconds > kReferenceLimitSeconds &&
        !insisted) {
      std::fflush(stdout);
      fmt::print(stderr,
                 "winnow: left out, about {:.0f} s: WINNOW_PIN={}=reference winnow bench "
                 "\"{}\"\n",
                 reference_seconds, problem.operation(), text);
      continue;
    }
    const bench::PinGuard pin(problem.operation(), v.implementation);
    const Timing timing = time_case(*c, options.repeat);
    report(options, machine, text, problem, v.implementation, *c, timing);
  }
}

void run(const Options& options) {
  std::vector<std::string> problems = bench::split_problems(options.words);
  for (const std::string& text : problems) {  // a mistake ends the run before it takes time
    bench::make_shapes(Problem::parse(text));
  }
  const bool named = !problems.empty();
  std::vector<const bench::Operation*> operations;
  for (const std::string& name : options.operations)
    operations.push_back(&bench::find_operation(name));
  if (!named && operations.empty()) {
    for (const bench::Operation& operation : bench::operations()) operations.push_back(&operation);
  }
  for (const bench::Operation* operation : operations) {
    const std::vector<std::string> list = options.device.kind == Device::Kind::kCpu
                                              ? operation->bench_problems
                                              : bench::gpu_bench_problems(operation->name);
    problems.insert(problems.end(), list.begin(), list.end());
  }
  if (options.device.kind == Device::Kind::kCuda && !cuda_refusal().empty()) {
    fail(Status::kUnsupported, "bench", "--device cuda needs a GPU: {}", cuda_refusal());
  }
  const MachineSpeed machine = measure_machine(options.device);
  if (!options.json) print_machine(machine, options.device);
  for (const std::string& text : problems) bench_problem(options, machine, text, named);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("bench", "time, GFLOP/s, GB/s and share of the machine's peak");
  const auto options = std::make_shared<Options>();
  command
      ->add_option("PROBLEM", options->words,
                   "an operation and name=value pairs; none: the shared list, about a minute")
      ->type_name("");
  command->add_option("--operation", options->operations, "the shared list of this operation only")
      ->type_name("NAME")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_flag("--all", options->all, "every implementation that accepts, not only the first");
  command->add_option("--repeat", options->repeat, "timed runs (default: 0.4 s, at least 3)")
      ->type_name("N")
      ->check(CLI::Range(1, 1'000'000).description(""));
  command->add_flag("--json", options->json, "one JSON object per line instead of a table");
  add_threads_option(*command);
  add_device_option(*command, &options->device);
  command->footer(
      R"(Columns: ms is the median run. GFLOP/s and GB/s count what the mathematics needs (2 per
multiply-add; inputs and outputs once), not what the kernel does. floor is the least time this
machine needs, over ms: the larger of FLOPs / multiply-add rate and bytes / bandwidth, both
measured at the start with the same threads; bandwidth at a working set of the problem's size.
A problem too long for its column stands above its figures; a training step's also says tokens/s.

Examples:
  winnow bench
  winnow bench --operation index_topk --threads 1
  winnow bench --all "index_scores rows=16 keys=4096 dtype=bf16"
  winnow bench --json "index_scores rows=16 keys=32768" | jq .ms
  winnow bench train                   a training step with index sharing and recomputation)");
  add_bench_train(*command);
  command->callback([command, options] {
    if (command->get_subcommands().empty()) run(*options);
  });
}

}  // namespace winnow::app
