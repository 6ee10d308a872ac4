// Small text helpers for messages.
#pragma once

#include <string>
#include <vector>

namespace winnow {

// The name closest to `word` by edit distance: "did you mean ...?". "" if there are no names.
std::string nearest_name(const std::string& word, const std::vector<std::string>& names);

}  // namespace winnow
