// Rules of a configuration: which options break one, with the value and a valid one beside it.
//
// A strict set of rules throws at the first that is broken: what a program that is about to run
// wants. A collecting one notes them all: what somebody who writes a configuration wants.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

namespace winnow {

struct Violation {
  std::string option;   // "attention.heads"
  std::string rule;     // "must be a multiple of attention.kv_heads = 3"
  std::string value;    // "4"; "" where the rule says it all
  std::string instead;  // a valid neighbour: "3", or "mtp_depths 2"; "" where there is none to name

  // "attention.heads must be a multiple of attention.kv_heads = 3, got 4"
  std::string text() const;
};

class Rules {
 public:
  enum class Mode { kThrow, kCollect };
  explicit Rules(Mode mode = Mode::kThrow) : mode_(mode) {}

  // Every rule is one call: whether it is kept, the option that it is about, its value, a valid
  // neighbour, and what it says.
  template <class Value, class Instead, class... A>
  void require(bool kept, const std::string& option, const Value& value, const Instead& instead,
               fmt::format_string<A...> rule, A&&... arguments) {
    if (kept) return;
    broken({option, fmt::format(rule, std::forward<A>(arguments)...), fmt::format("{}", value),
            fmt::format("{}", instead)});
  }
  void broken(Violation violation);

  // The option's value is missing or no value of its kind. What other rules say of it, or of what
  // lies inside it, would be about nothing, and is not noted.
  void unread(const std::string& option) { unread_.push_back(option); }

  bool kept() const { return violations_.empty(); }  // all so far
  const std::vector<Violation>& violations() const { return violations_; }

 private:
  const Mode mode_;
  std::vector<Violation> violations_;
  std::vector<std::string> unread_;
};

// Valid neighbours. The nearest multiple of `step`, from `step` on, at or above `value`.
std::int64_t multiple_above(std::int64_t value, std::int64_t step);
// The largest divisor of `of` that is at most `value`; 1 where none is found near it.
std::int64_t divisor_below(std::int64_t of, std::int64_t value);

}  // namespace winnow
