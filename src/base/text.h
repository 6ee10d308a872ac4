// Small text helpers for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace winnow {

// The name closest to `word` by edit distance: "did you mean ...?". "" if there are no names.
std::string nearest_name(const std::string& word, const std::vector<std::string>& names);

// What to say of a word that is none of the names: `did you mean "rows"?` where one is near, else
// "there are rows, keys and topk". "" if there are no names.
std::string name_hint(const std::string& word, const std::vector<std::string>& names);

// "a, b or c", with another word before the last.
std::string choice_text(const std::vector<std::string>& words, const char* last = " or ");

// A number of bytes for the eye: "17 B", "1.5 KiB", "320 MiB".
std::string size_text(double bytes);

}  // namespace winnow
