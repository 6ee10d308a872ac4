// winnow check: every implementation of every operation against the double-precision reference,
// and against golden vectors of other implementations.
#include "base/check.h"

#include <fmt/format.h>

#include <optional>

#include "apps/winnow/commands.h"
#include "apps/winnow/golden.h"
#include "bench/case.h"
#include "bench/placement.h"

namespace winnow::app {
namespace {

struct Options {
  std::vector<std::string> words;
  std::string golden;
  Device device;
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
  // `again` is the command that repeats the check.
  void add(const std::string& operation, const bench::CheckResult& result,
           const std::string& again) {
    Line& line = find(operation, result.implementation);
    ++(result.failure.empty() ? line.passed : line.failed);
    for (const bench::Comparison& x : result.comparisons) {
      if (!x.exact && x.error >= line.worst) {
        line.worst = x.error;
        line.output = x.output;
      }
    }
    if (result.failure.empty()) return;
    std::string pin;
    if (!result.implementation.empty()) {
      pin = fmt::format("WINNOW_PIN={}={} ", operation,
                        result.implementation.substr(0, result.implementation.find(' ')));
    }
    misses_.push_back(
        fmt::format("{}: {}\n  again: {}{}", result.problem, result.failure, pin, again));
  }

  // The table of what came since the last call.
  void print_table(const std::string& title, const char* counted) {
    fmt::print("{}\n{:<28}{:<16}{:>9}  {}\n", title, "operation", "implementation", counted,
               "worst error / bound");
    for (const Line& line : lines_) {
      fmt::print("{:<28}{:<16}{:>9}  {}{}\n", line.operation, line.implementation,
                 line.passed + line.failed,
                 line.output.empty() ? "equal" : fmt::format("{:.2g} {}", line.worst, line.output),
                 line.failed == 0 ? "" : fmt::format(", {} FAILED", line.failed));
      passed_ += line.passed;
      failed_ += line.failed;
    }
    fmt::print("\n");
    lines_.clear();
  }

  // The misses, what was skipped and, as the very last line, the count. Returns whether all is well.
  bool print_end(std::size_t skipped) const {
    for (const std::string& miss : misses_) fmt::print("FAILED {}\n\n", miss);
    if (skipped > 0) fmt::print("{} skipped\n", skipped);
    fmt::print("{} passed, {} failed\n", passed_, failed_);
    return failed_ == 0 && passed_ > 0;
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
  int passed_ = 0, failed_ = 0;
};

// " --device cuda:0", for a command that repeats a check; nothing for the CPU.
std::string device_flag(Device device) {
  return device.kind == Device::Kind::kCpu ? "" : " --device " + device_text(device);
}

// Throws for a mistake, before anything is run.
std::vector<std::string> problems_of(const std::vector<std::string>& words) {
  std::vector<std::string> problems = bench::split_problems(words);
  for (const std::string& text : problems) bench::Problem::parse(text);
  return problems.empty() ? bench::all_check_problems() : problems;
}

void check_problems(const std::vector<std::string>& problems, Device device, Report* report) {
  for (const std::string& text : problems) {
    const std::string operation = bench::Problem::parse(text).operation();
    for (const bench::CheckResult& result : bench::check_problem(text, device))
      report->add(operation, result,
                  fmt::format("winnow check{} \"{}\"", device_flag(device), text));
  }
  report->print_table("Problems against the double-precision reference", "problems");
}

// Returns how much of the directory was skipped.
std::size_t check_golden_directory(const GoldenDirectory& files, Device device, Report* report) {
  const std::string directory = files.path.string();
  const auto placement = bench::place(device);
  const GoldenReport golden = check_golden(files);
  for (const GoldenResult& g : golden.results) {
    report->add(g.operation, g.result,
                fmt::format("winnow check{} --golden {}", device_flag(device), directory));
  }
  if (!golden.results.empty()) report->print_table("Golden vectors of " + directory, "files");
  for (const std::string& skipped : golden.skipped) fmt::print("skipped {}\n", skipped);
  if (!golden.skipped.empty()) fmt::print("\n");
  return golden.skipped.size();
}

void run(const Options& options) {
  const std::vector<std::string> problems = problems_of(options.words);
  Report report;
  std::size_t skipped = 0;
  try {
    std::optional<GoldenDirectory> golden;  // looked at before anything takes time
    if (!options.golden.empty()) golden = find_golden(options.golden);
    check_problems(problems, options.device, &report);
    if (golden) skipped = check_golden_directory(*golden, options.device, &report);
  } catch (...) {
    report.print_end(0);  // the count ends the report whatever happened
    throw;
  }
  if (!report.print_end(skipped)) throw Exit{1};
}

}  // namespace

void add_check(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "check", "compares every implementation with the reference, and with golden vectors");
  const auto options = std::make_shared<Options>();
  command
      ->add_option("PROBLEM", options->words,
                   "an operation and name=value pairs; none: the shared list of all operations")
      ->type_name("");
  command
      ->add_option("--golden", options->golden,
                   "also compare with the golden vectors of DIR: ops/, kpool/ and layouts.json; "
                   "models/ are named as skipped")
      ->type_name("DIR");
  add_device_option(*command, &options->device);
  command->footer(
      R"(Every implementation that accepts a problem runs it with 1 and with 17 threads (the bits must
agree), into poisoned outputs between guard pages, and is compared with the double-precision
reference. "worst error / bound" is the largest difference over the bound that is derived for
that element: up to 1 is well. Selections, and memory that must not be written, must be equal. No operation may allocate.

Examples:
  winnow check
  winnow check "index_scores rows=7 keys=300 dtype=bf16"
    operation                   implementation   problems  worst error / bound
    index_scores                cpu.avx2                1  0.011 index_scores
    ...
    3 passed, 0 failed
  winnow check --golden my/golden
  WINNOW_PIN=index_scores=cpu.portable winnow check index_scores

The last line counts; exit status 1 on a miss, or if there was nothing to check.)");
  command->callback([options] { run(*options); });
}

}  // namespace winnow::app
