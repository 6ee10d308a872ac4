#include "base/run_first.h"

#include <array>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "base/cpu_features.h"

namespace winnow {
namespace {

struct Choices {
  std::shared_mutex mutex;
  std::map<std::string, std::string, std::less<>> pins;
  std::set<std::pair<std::string, std::string>, std::less<>> forbidden;
  bool any = false;  // most processes never pin: keep the common path short

  Choices() {
    const char* text = std::getenv("WINNOW_PIN");
    std::string_view rest = text != nullptr ? text : "";
    while (!rest.empty()) {
      const std::string_view entry = rest.substr(0, rest.find(','));
      rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
      const std::size_t equals = entry.find('=');
      WINNOW_CHECK("implementations",
                   equals != std::string_view::npos && equals > 0 && equals + 1 < entry.size(),
                   "WINNOW_PIN must read operation=implementation[,...], got \"{}\"", text);
      pins[std::string(entry.substr(0, equals))] = entry.substr(equals + 1);
      any = true;
    }
  }
};
Choices& choices() {
  static Choices instance;
  return instance;
}

// Fixed slots: noting a run allocates nothing.
struct LastRun {
  std::string_view operation;
  const char* implementation = "";
};
thread_local std::array<LastRun, 32> last_runs;

}  // namespace

std::string Explanation::chosen() const {
  for (const Verdict& v : verdicts) {
    if (v.refusal.empty()) return v.implementation;
  }
  return "";
}

void pin_implementation(std::string_view operation, std::string_view implementation) {
  const std::unique_lock lock(choices().mutex);
  if (implementation.empty()) {
    if (const auto it = choices().pins.find(operation); it != choices().pins.end()) {
      choices().pins.erase(it);
    }
  } else {
    choices().pins[std::string(operation)] = implementation;
  }
  choices().any = !choices().pins.empty() || !choices().forbidden.empty();
}

std::map<std::string, std::string> pinned_implementations() {
  const std::shared_lock lock(choices().mutex);
  return {choices().pins.begin(), choices().pins.end()};
}

void forbid_implementation(std::string_view operation, std::string_view implementation) {
  const std::unique_lock lock(choices().mutex);
  choices().forbidden.emplace(operation, implementation);
  choices().any = true;
}

void allow_implementation(std::string_view operation, std::string_view implementation) {
  const std::unique_lock lock(choices().mutex);
  choices().forbidden.erase({std::string(operation), std::string(implementation)});
  choices().any = !choices().pins.empty() || !choices().forbidden.empty();
}

std::string last_implementation(std::string_view operation) {
  for (const LastRun& run : last_runs) {
    if (run.operation == operation) return run.implementation;
  }
  return "";
}

Refusal detail::refuse_by_processor(std::string_view implementation) {
  constexpr std::string_view kCpu = "cpu.";
  if (implementation.substr(0, kCpu.size()) != kCpu) return {};
  return refuse_instruction_set(implementation.substr(kCpu.size()));
}

std::string detail::refuse_by_user(std::string_view operation, std::string_view implementation) {
  Choices& c = choices();
  const std::shared_lock lock(c.mutex);
  if (!c.any) return "";
  if (const auto pin = c.pins.find(operation);
      pin != c.pins.end() && pin->second != implementation) {
    return fmt::format("{} is pinned to {}", operation, pin->second);
  }
  for (const std::string_view scope : {operation, std::string_view("*")}) {
    if (c.forbidden.contains({std::string(scope), std::string(implementation)})) {
      return fmt::format("it is forbidden for {}", scope == "*" ? "all operations" : operation);
    }
  }
  return "";
}

void detail::note_run(std::string_view operation, const Explanation* refusals,
                      const char* implementation) {
  for (LastRun& run : last_runs) {
    if (run.operation.empty() || run.operation == operation) {
      run = {operation, implementation};
      break;
    }
  }
  if (refusals == nullptr) return;
  for (const Verdict& v : refusals->verdicts) {
    if (v.implementation == implementation) break;
    log_once(fmt::format("{}: {} runs, since {}: {}", operation, implementation, v.implementation,
                         v.refusal));
  }
}

}  // namespace winnow
