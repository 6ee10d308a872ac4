// Random problems of every operation, for WINNOW_RANDOM_SECONDS (600): each implementation against
// the reference, between guard pages, with one thread and with seventeen.
//
// A problem starts from one of the operation's check list; some of its values are then replaced, by
// awkward numbers or by what other problems of the list have in that place. A problem that the
// rules of the operation refuse is counted and left. WINNOW_RANDOM_SEED repeats a run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "bench/case.h"
#include "bench/data.h"
#include "winnow/error.h"

namespace winnow::bench {
namespace {

using Values = std::map<std::string, std::string>;  // parameter -> value

Values values_of(const std::string& problem) {
  Values values;
  std::istringstream words(problem);
  for (std::string word; words >> word;) {
    if (const std::size_t equal = word.find('='); equal != std::string::npos) {
      values[word.substr(0, equal)] = word.substr(equal + 1);
    }
  }
  return values;
}

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

// Of two of its numbers: about the elements of its largest tensor.
double largest_product(const std::string& problem) {
  double first = 1, second = 1;
  for (const auto& [name, value] : values_of(problem)) {
    if (!is_number(value)) continue;
    second = std::max(second, std::min(first, std::stod(value)));
    first = std::max(first, std::stod(value));
  }
  return first * second;
}

std::string from_environment(const char* name, const char* fallback) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : fallback;
}

// What a crash leaves: the problem that it happened in.
std::string current;
void report_crash(int signal) {
  std::fputs(fmt::format("\nsignal {} in: {}\n", signal, current).c_str(), stderr);
  std::_Exit(128 + signal);
}

class RandomProblem {
 public:
  RandomProblem(const Operation& operation, Random& random)
      : operation_(operation), random_(random) {
    for (const Parameter& p : operation.parameters) seen_[p.name].insert(p.fallback);
    for (const std::string& text : operation.check_problems) {
      for (const auto& [name, value] : values_of(text)) seen_[name].insert(value);
    }
  }

  std::string draw() {
    Values values = values_of(pick(operation_.check_problems));
    for (const Parameter& p : operation_.parameters) {
      // A budget that is too small is an error of the call, and each implementation has its own.
      if (std::string_view(p.name) == "budget")
        values.erase(p.name);
      else if (random_.below(3) == 0)
        values[p.name] = replacement(p.name);
    }
    std::string text = operation_.name;
    for (const auto& [name, value] : values) text += fmt::format(" {}={}", name, value);
    return text;
  }

 private:
  template <class Container>
  const std::string& pick(const Container& from) {
    auto at = from.begin();
    std::advance(at, random_.below(static_cast<std::int64_t>(from.size())));
    return *at;
  }
  std::string replacement(const std::string& name) {
    const std::string& other = pick(seen_.at(name));
    if (!is_number(other) || other.size() == 1 || random_.below(2) == 0) return other;
    static constexpr std::int64_t kAround[] = {0, 1, 2, 8, 16, 32, 64, 128, 256, 512};
    const std::int64_t around = kAround[random_.below(std::ssize(kAround))];
    return std::to_string(std::max<std::int64_t>(0, around + random_.below(3) - 1));
  }

  const Operation& operation_;
  Random& random_;
  std::map<std::string, std::set<std::string>> seen_;
};

constexpr double kMostFlops = 5e7;     // the references are slow
constexpr double kMostElements = 2e7;  // and data take time to make

TEST(RandomProblems, MatchTheReference) {
  for (const int signal : {SIGFPE, SIGSEGV, SIGBUS, SIGILL, SIGTERM})
    std::signal(signal, report_crash);
  const double seconds = std::stod(from_environment("WINNOW_RANDOM_SECONDS", "600"));
  const auto seed = std::stoull(from_environment("WINNOW_RANDOM_SEED", "0"));
  const auto begin = std::chrono::steady_clock::now();
  auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto now = static_cast<std::uint64_t>(begin.time_since_epoch().count());
  Random random(Random(seed != 0 ? seed : now).bits());  // neighbouring seeds, unlike streams
  std::int64_t checked = 0, refused = 0, too_large = 0;
  for (std::int64_t turn = 0; elapsed() < seconds && !HasFailure(); ++turn) {
    const Operation& operation =
        operations()[static_cast<std::size_t>(turn % std::ssize(operations()))];
    // A step's bound is relative to the norms of its gradients, which degenerate models bring to 0.
    if (std::string_view(operation.name) == "training_step") continue;
    const std::string text = RandomProblem(operation, random).draw();
    current = text;
    if (largest_product(text) > kMostElements) {
      ++too_large;
      continue;
    }
    try {
      const Cost cost = operation.make(Problem::parse(text))->cost();
      if (cost.flops > kMostFlops || cost.bytes > 1e8) {
        ++too_large;
        continue;
      }
      operation.make(Problem::parse(text))->explain();  // the rules of the operation
    } catch (const Error&) {
      ++refused;
      continue;
    }
    for (const CheckResult& r : check_problem(text)) {
      ++checked;
      EXPECT_EQ(r.failure, "") << "again: WINNOW_PIN=" << operation.name << "=" << r.implementation
                               << " winnow check \"" << text << "\"";
    }
  }
  fmt::print("{} checked, {} refused by the rules, {} too large, {:.0f} s\n", checked, refused,
             too_large, elapsed());
  EXPECT_GT(checked, 0);
}

}  // namespace
}  // namespace winnow::bench
