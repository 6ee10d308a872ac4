// winnow why: who would run a call, and why the others refuse.
#include <fmt/format.h>

#include "apps/winnow/commands.h"
#include "bench/case.h"
#include "bench/placement.h"

namespace winnow::app {
namespace {

void print_operations() {
  fmt::print(
      "A problem is an operation and name=value pairs; what is left out takes its default.\n");
  for (const bench::Operation& operation : bench::operations()) {
    fmt::print("\n{}: {}\n", operation.name, operation.summary);
    for (const bench::Parameter& p : operation.parameters)
      fmt::print("  {:<16}{:<10}{}\n", p.name, p.fallback, p.meaning);
  }
  fmt::print(
      "\nExamples:\n"
      "  winnow why \"index_scores rows=16 keys=4096 dtype=bf16\"\n"
      "  winnow why index_scores dtype=f64\n");
}

void print_verdicts(const std::string& text, Device device) {
  const auto placement = bench::place(device);
  const bench::Problem problem = bench::Problem::parse(text);
  const std::unique_ptr<bench::Case> c = bench::find_operation(problem.operation()).make(problem);
  const Explanation explanation = c->explain();
  const std::string chosen = explanation.chosen();
  fmt::print("{}\n", problem.text());
  for (const auto& [operation, implementation] : pinned_implementations()) {
    if (operation == problem.operation())
      fmt::print("  WINNOW_PIN allows only {}\n", implementation);
  }
  for (const Verdict& v : explanation.verdicts) {
    std::string verdict = "refuses: " + v.refusal;
    if (v.implementation == chosen) {
      verdict = fmt::format("runs, with a workspace of {} bytes", c->workspace_bytes());
    } else if (v.refusal.empty()) {
      verdict = "accepts, but stands after " + chosen;
    }
    fmt::print("  {:<18}{}\n", v.implementation, verdict);
  }
  if (chosen.empty()) throw Exit{1};
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
  command->footer(R"(Examples:
  winnow why                                     the operations, their parameters and defaults
  winnow why index_scores                        a call with the defaults
  winnow why "index_scores keys=4096 dtype=f64"
    index_scores keys=4096 dtype=f64
      cpu.avx2          refuses: f64 is left to the reference
      cpu.portable      refuses: f64 is left to the reference
      reference         runs, with a workspace of 0 bytes
  WINNOW_PIN=index_scores=cpu.portable winnow why index_scores

Exit status 1 if nobody accepts the call.)");
  command->callback([words, device] {
    if (words->empty()) print_operations();
    for (const std::string& text : bench::split_problems(*words)) print_verdicts(text, *device);
  });
}

}  // namespace winnow::app
