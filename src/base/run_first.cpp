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

using Pair = std::pair<std::string, std::string>;  // operation, implementation

// "index_topk=reference,sparse_attention=cpu.portable" of an environment variable.
std::vector<Pair> pairs_of(const char* variable) {
  std::vector<Pair> pairs;
  const char* text = std::getenv(variable);
  std::string_view rest = text != nullptr ? text : "";
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const std::size_t equals = entry.find('=');
    WINNOW_CHECK("implementations",
                 equals != std::string_view::npos && equals > 0 && equals + 1 < entry.size(),
                 "{} must read operation=implementation[,...], got \"{}\"", variable, text);
    pairs.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return pairs;
}

struct Choices {
  std::shared_mutex mutex;
  std::map<std::string, std::string, std::less<>> pins;
  std::set<Pair> forbidden;
  bool any = false;  // most processes never pin: keep the common path short

  Choices() {
    for (const auto& [operation, implementation] : pairs_of("WINNOW_PIN"))
      pins[operation] = implementation;
    for (auto& pair : pairs_of("WINNOW_FORBID")) forbidden.insert(std::move(pair));
    note_any();
  }
  void note_any() { any = !pins.empty() || !forbidden.empty(); }

  // Why the user keeps an implementation from an operation.
  enum class Reason { kNone, kPinned, kForbidden, kForbiddenEverywhere };
  Reason against(std::string_view operation, std::string_view implementation) const {
    if (!any) return Reason::kNone;
    if (const auto pin = pins.find(operation); pin != pins.end() && pin->second != implementation)
      return Reason::kPinned;
    for (const auto& [scope, name] : forbidden) {
      if (name != implementation) continue;
      if (scope == "*") return Reason::kForbiddenEverywhere;
      if (scope == operation) return Reason::kForbidden;
    }
    return Reason::kNone;
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
  choices().note_any();
}

std::map<std::string, std::string> pinned_implementations() {
  const std::shared_lock lock(choices().mutex);
  return {choices().pins.begin(), choices().pins.end()};
}

void forbid_implementation(std::string_view operation, std::string_view implementation) {
  const std::unique_lock lock(choices().mutex);
  choices().forbidden.emplace(operation, implementation);
  choices().note_any();
}

void allow_implementation(std::string_view operation, std::string_view implementation) {
  const std::unique_lock lock(choices().mutex);
  choices().forbidden.erase({std::string(operation), std::string(implementation)});
  choices().note_any();
}

std::vector<std::pair<std::string, std::string>> forbidden_implementations() {
  const std::shared_lock lock(choices().mutex);
  return {choices().forbidden.begin(), choices().forbidden.end()};
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
  const Choices& c = choices();
  const std::shared_lock lock(choices().mutex);
  switch (c.against(operation, implementation)) {
    case Choices::Reason::kPinned:
      return fmt::format("{} is pinned to {}", operation, c.pins.find(operation)->second);
    case Choices::Reason::kForbidden: return fmt::format("it is forbidden for {}", operation);
    case Choices::Reason::kForbiddenEverywhere: return "it is forbidden for all operations";
    case Choices::Reason::kNone: break;
  }
  return "";
}

bool detail::user_allows(std::string_view operation, std::string_view implementation) {
  const std::shared_lock lock(choices().mutex);
  return choices().against(operation, implementation) == Choices::Reason::kNone;
}

void detail::fail_without_implementation(const Explanation& refusals) {
  const auto pins = pinned_implementations();
  const auto pin = pins.find(refusals.operation);
  bool exists = false;
  std::string names, reasons;
  for (const Verdict& v : refusals.verdicts) {
    exists = exists || (pin != pins.end() && pin->second == v.implementation);
    names += (names.empty() ? "" : ", ") + v.implementation;
    reasons += fmt::format("; {}: {}", v.implementation, v.refusal);
  }
  if (pin != pins.end() && !exists) {
    fail(Status::kUnsupported, refusals.operation,
         "it is pinned to {}, which this build does not have; it has {}", pin->second, names);
  }
  fail(Status::kUnsupported, refusals.operation, "no implementation accepts this call{}", reasons);
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
