// winnow why: who would run a call, and why the others refuse.
#include <fmt/format.h>

#include "apps/winnow/commands.h"
#include "base/text.h"
#include "bench/case.h"
#include "bench/placement.h"
#include "winnow/error.h"
#include "winnow/threads.h"

namespace winnow::app {
namespace {

void print_operations() {
  fmt::print(
      "A problem is an operation and name=value pairs; what is left out takes its default.\n");
  for (const bench::Operation& operation : bench::operations()) {
    fmt::print("\n{}: {}\n", operation.name, operation.summary);
    for (const bench::Parameter& p : operation.parameters)
      fmt::print("  {:<16}{:<10}{}\n", p.name, p.fallback, p.help());
  }
  fmt::print(
      "\nExamples:\n"
      "  winnow why \"index_scores rows=16 keys=4096 dtype=bf16\"\n"
      "  winnow why index_scores dtype=f64\n");
}

// "17 bytes", "1.2 MiB (1234567 bytes)"
std::string bytes_text(std::int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  return fmt::format("{} ({} bytes)", size_text(static_cast<double>(bytes)), bytes);
}

// What an implementation would ask for, were it the only one.
std::string workspace_text(const bench::Case& c, const std::string& operation,
                           const std::string& implementation) {
  if (c.keeps_own_memory() && c.workspace_bytes() == 0) return "its memory is not counted";
  const bench::PinGuard pin(operation, implementation);
  return "workspace " + bytes_text(c.workspace_bytes());
}

// Of shapes alone: nothing of the problem's size is allocated.
void print_why(const bench::Problem& problem) {
  const std::unique_ptr<bench::Case> c = bench::make_shapes(problem);
  const Explanation explanation = c->explain();
  const std::string chosen = explanation.chosen();
  fmt::print("{}\n", problem.text());
  for (const auto& [operation, implementation] : pinned_implementations()) {
    if (operation == problem.operation())
      fmt::print("  WINNOW_PIN allows only {}\n", implementation);
  }
  bool runs = !chosen.empty();
  for (const Verdict& v : explanation.verdicts) {
    std::string verdict = "refuses: " + v.refusal;
    if (v.refusal.empty()) {
      verdict = v.implementation == chosen ? "runs" : "accepts, but stands after " + chosen;
      try {
        verdict += "; " + workspace_text(*c, problem.operation(), v.implementation);
      } catch (const Error& e) {  // a budget that is too small for it
        verdict = fmt::format("would be an error: {}", e.what());
        runs = runs && v.implementation != chosen;
      }
    }
    fmt::print("  {:<18}{}\n", v.implementation, verdict);
  }
  for (const auto& [operation, implementation] : c->parts())
    fmt::print("  {:<34}{}\n", "inside: " + operation, implementation);
  const bench::TensorBytes tensors = c->tensor_bytes();
  fmt::print("  {:<18}{}\n  {:<18}{}\n", "inputs", bytes_text(tensors.inputs), "outputs",
             bytes_text(tensors.outputs));
  const int threads = num_threads();
  fmt::print("  {:<18}{}", "threads", threads);
  if (c->budget() > 0) fmt::print("\n  {:<18}{}", "budget", bytes_text(c->budget()));
  fmt::print("\n");
  if (!runs) throw Exit{1};
}

}  // namespace

void add_why(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("why", "who would run a call, and why others do not; lists operations");
  const auto words = std::make_shared<std::vector<std::string>>();
  command->add_option("PROBLEM", *words, "an operation and name=value pairs; none: lists them all")
      ->type_name("");
  const auto device = std::make_shared<Device>();
  add_device_option(*command, device.get());
  add_threads_option(*command);
  command->footer(
      R"(Nothing of the problem's size is allocated, so any size can be asked. For every implementation that
accepts, the workspace that it would ask for with these threads; then all that the call reads and writes.

Examples:
  winnow why                                     the operations, their parameters and defaults
  winnow why index_scores                        a call with the defaults
  winnow why "index_topk rows=16384 keys=1048576 dtype=bf16" --threads 8
  winnow why "index_scores keys=4096 dtype=f64"
    index_scores keys=4096 dtype=f64
      cpu.amx           refuses: this processor lacks AMX tiles with BF16 products
      cpu.avx512        refuses: this processor lacks AVX-512 F, BW, DQ or VL
      cpu.avx2          refuses: f64 is left to the reference
      cpu.portable      refuses: f64 is left to the reference
      reference         runs; workspace 0 bytes
      inputs            5.0 MiB (5251200 bytes)
      outputs           512 KiB (524288 bytes)
      threads           2
  WINNOW_PIN=index_scores=cpu.portable winnow why index_scores
  WINNOW_FORBID=*=cpu.avx512 winnow why index_scores

Environment: WINNOW_PIN=OPERATION=IMPLEMENTATION[,...] lets only that one run, WINNOW_FORBID (the same form;
* is any operation) all but that one.

Exit status 1 if nobody accepts the call.)");
  command->callback([words, device] {
    if (words->empty()) return print_operations();
    const auto placement = bench::place(*device);
    std::vector<bench::Problem> problems;  // a mistake ends the command before it prints anything
    for (const std::string& text : bench::split_problems(*words))
      problems.push_back(bench::Problem::parse(text));
    for (const bench::Problem& problem : problems) print_why(problem);
  });
}

}  // namespace winnow::app
