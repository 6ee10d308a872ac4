// Reads one JSON object key by key, and refuses what it does not know: by name, with the nearest
// valid name. Where `rules` collect instead of throwing, what cannot be read is noted once, and
// reads as 0, false, "" or empty.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/rules.h"

namespace winnow::model {

class JsonReader {
 public:
  // `path` names the object in messages: "attention.indexer"; "" for the outermost.
  JsonReader(const nlohmann::json& object, std::string path, Rules& rules);

  bool has(const std::string& key);  // of a key that may be left out
  std::int64_t integer(const std::string& key);
  std::int64_t integer_or(const std::string& key, std::int64_t absent);
  double number(const std::string& key);
  bool boolean(const std::string& key);
  std::string string(const std::string& key);
  const nlohmann::json& object(const std::string& key);
  const nlohmann::json& array(const std::string& key);
  std::vector<std::string> strings(const std::string& key);  // a list of them
  // One of the words, as its value.
  template <class Value>
  Value word(const std::string& key, const std::vector<std::pair<const char*, Value>>& words) {
    const std::string text = string(key);
    std::vector<std::string> names;
    for (const auto& [name, value] : words) {
      if (text == name) return value;
      names.emplace_back(name);
    }
    refuse_word(key, text, names);
    return words.front().second;
  }

  // These keys exist, but not beside what was read: `why` says what they belong to.
  void refuse(const std::vector<std::string>& keys, const std::string& why);
  // To be called last: refuses every key that nobody asked for.
  void finish() const;

  std::string full(const std::string& key) const;  // with the path before it
  Rules& rules() const { return rules_; }

 private:
  const nlohmann::json* find(const std::string& key);
  // The value of a key if it is there and `fits`; noted if not, and null.
  const nlohmann::json* get(const std::string& key, bool (*fits)(const nlohmann::json&),
                            const char* kind);
  void refuse_word(const std::string& key, const std::string& text,
                   const std::vector<std::string>& names) const;

  const nlohmann::json& object_;
  const std::string path_;
  Rules& rules_;
  const bool silent_;  // there is no object, which has been said
  std::vector<std::string> known_;
};

}  // namespace winnow::model
