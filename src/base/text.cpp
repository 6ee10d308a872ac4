#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace winnow {
namespace {

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_name(const std::string& word, const std::vector<std::string>& names) {
  std::string best;
  std::size_t best_distance = 0;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(word, name);
    if (best.empty() || distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

std::string name_hint(const std::string& word, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  const std::string nearest = nearest_name(word, names);
  const std::size_t longer = std::max(word.size(), nearest.size());
  if (2 * edit_distance(word, nearest) <= longer)
    return fmt::format("did you mean \"{}\"?", nearest);
  return "there are " + choice_text(names, " and ");
}

std::string choice_text(const std::vector<std::string>& words, const char* last) {
  std::string text;
  for (std::size_t n = 0; n < words.size(); ++n) {
    if (n > 0) text += n + 1 == words.size() ? last : ", ";
    text += words[n];
  }
  return text;
}

std::string size_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 5; ++unit) bytes /= 1024;
  return fmt::format("{:.{}f} {}", bytes, unit > 0 && bytes < 10 ? 1 : 0, units[unit]);
}

}  // namespace winnow
