// winnow check: every implementation of every operation against the double-precision reference.
#include <fmt/format.h>

#include <algorithm>

#include "apps/winnow/commands.h"
#include "bench/case.h"

namespace winnow::app {
namespace {

struct Options {
  std::vector<std::string> words;
};

// One line of the table: an implementation of an operation.
struct Line {
  std::string operation, implementation;
  int passed = 0, failed = 0;
  double worst = 0;    // the largest error / bound of the outputs that have bounds
  std::string output;  // where that was
};

class Report {
 public:
  void add(const std::string& operation, const bench::CheckResult& result) {
    Line& line = find(operation, result.implementation);
    ++(result.failure.empty() ? line.passed : line.failed);
    for (const bench::Comparison& x : result.comparisons) {
      if (!x.exact && x.error > line.worst) {
        line.worst = x.error;
        line.output = x.output;
      }
    }
    if (!result.failure.empty()) {
      misses_.push_back(fmt::format("{}\n    again: WINNOW_PIN={}={} winnow check \"{}\"",
                                    result.failure, operation, result.implementation,
                                    result.problem));
    }
  }

  // Prints everything; the last line counts. Returns whether all is well.
  bool print() const {
    fmt::print("{:<26}{:<15}{:>9}  {}\n", "operation", "implementation", "problems",
               "worst error / bound");
    int passed = 0, failed = 0;
    for (const Line& line : lines_) {
      fmt::print("{:<26}{:<15}{:>9}  {}{}\n", line.operation, line.implementation,
                 line.passed + line.failed,
                 line.output.empty() ? "equal" : fmt::format("{:.2g} {}", line.worst, line.output),
                 line.failed == 0 ? "" : fmt::format(", {} FAILED", line.failed));
      passed += line.passed;
      failed += line.failed;
    }
    for (const std::string& miss : misses_) fmt::print("\nFAILED {}\n", miss);
    fmt::print("{} passed, {} failed\n", passed, failed);
    return failed == 0 && passed > 0;
  }

 private:
  Line& find(const std::string& operation, const std::string& implementation) {
    for (Line& line : lines_) {
      if (line.operation == operation && line.implementation == implementation) return line;
    }
    lines_.push_back({operation, implementation, 0, 0, 0, ""});
    return lines_.back();
  }

  std::vector<Line> lines_;
  std::vector<std::string> misses_;
};

void run(const Options& options) {
  std::vector<std::string> problems = bench::split_problems(options.words);
  if (problems.empty()) {
    for (const bench::Operation& o : bench::operations())
      problems.insert(problems.end(), o.check_problems.begin(), o.check_problems.end());
  }
  Report report;
  for (const std::string& text : problems) {
    const std::string operation = bench::Problem::parse(text).operation();
    for (const bench::CheckResult& result : bench::check_problem(text))
      report.add(operation, result);
  }
  if (!report.print()) throw Exit{1};
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("check", "compares every implementation with the reference");
  const auto options = std::make_shared<Options>();
  command
      ->add_option("PROBLEM", options->words,
                   "an operation and name=value pairs; none: the shared list of all operations")
      ->type_name("");
  command->footer(R"(Examples:
  winnow check
  winnow check "index_scores rows=7 keys=300 dtype=bf16")");
  command->callback([options] { run(*options); });
}

}  // namespace winnow::app
