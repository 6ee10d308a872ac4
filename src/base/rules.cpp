#include "base/rules.h"

#include <algorithm>
#include <cctype>

#include "base/check.h"

namespace winnow {
namespace {

bool part_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Whether the text names the option, or one inside it, and not only a longer word.
bool names(const std::string& text, const std::string& option) {
  for (std::size_t at = text.find(option); at != std::string::npos;
       at = text.find(option, at + 1)) {
    const std::size_t end = at + option.size();
    const bool begins = at == 0 || !part_of_name(text[at - 1]);
    if (begins && (end == text.size() || !part_of_name(text[end]))) return true;
  }
  return false;
}

}  // namespace

std::string Violation::text() const {
  return fmt::format("{} {}{}{}", option, rule, value.empty() ? "" : ", got ", value);
}

void Rules::broken(Violation violation) {
  if (mode_ == Mode::kThrow) fail(Status::kInvalidArgument, "config", "{}", violation.text());
  const bool about_nothing =
      std::any_of(unread_.begin(), unread_.end(), [&](const std::string& option) {
        return names(violation.option, option) || names(violation.rule, option);
      });
  if (!about_nothing) violations_.push_back(std::move(violation));
}

std::int64_t multiple_above(std::int64_t value, std::int64_t step) {
  return std::max<std::int64_t>(1, (value + step - 1) / step) * step;
}

std::int64_t divisor_below(std::int64_t of, std::int64_t value) {
  value = std::clamp<std::int64_t>(value, 1, std::max<std::int64_t>(of, 1));
  constexpr std::int64_t kTries = 1 << 20;
  for (std::int64_t i = 0; i < kTries && value > 1 && of % value != 0; ++i) --value;
  return of % value == 0 ? value : 1;
}

}  // namespace winnow
