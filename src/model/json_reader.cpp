#include "model/json_reader.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "base/text.h"

namespace winnow::model {
namespace {

constexpr char kName[] = "config";

// A value in a message, shortened: a configuration may be hostile. What lists and objects hold is
// left out, since printing one that is nested a million deep would exhaust the stack.
std::string shown(const nlohmann::json& value) {
  if (value.is_structured() && !value.empty()) return value.is_array() ? "[...]" : "{...}";
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  return text;
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

}  // namespace

JsonReader::JsonReader(const nlohmann::json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  WINNOW_CHECK(kName, object.is_object(), "{} must be a JSON object, got {}",
               path_.empty() ? "the configuration" : path_, shown(object));
}

std::string JsonReader::full(const std::string& key) const {
  return path_.empty() ? key : path_ + "." + key;
}

const nlohmann::json& JsonReader::get(const std::string& key) {
  known_.push_back(key);
  const auto found = object_.find(key);
  WINNOW_CHECK(kName, found != object_.end(), "{} is required and has no default", full(key));
  return *found;
}

bool JsonReader::has(const std::string& key) {
  known_.push_back(key);
  return object_.contains(key);
}

std::int64_t JsonReader::integer(const std::string& key) {
  const nlohmann::json& value = get(key);
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <=
                         static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  WINNOW_CHECK(kName, fits, "{} must be an integer of 64 bit, got {}", full(key), shown(value));
  return value.get<std::int64_t>();
}

std::int64_t JsonReader::integer_or(const std::string& key, std::int64_t absent) {
  if (object_.contains(key)) return integer(key);
  known_.push_back(key);
  return absent;
}

double JsonReader::number(const std::string& key) {
  const nlohmann::json& value = get(key);
  WINNOW_CHECK(kName, value.is_number(), "{} must be a number, got {}", full(key), shown(value));
  return value.get<double>();
}

bool JsonReader::boolean(const std::string& key) {
  const nlohmann::json& value = get(key);
  WINNOW_CHECK(kName, value.is_boolean(), "{} must be true or false, got {}", full(key),
               shown(value));
  return value.get<bool>();
}

const nlohmann::json& JsonReader::object(const std::string& key) {
  const nlohmann::json& value = get(key);
  WINNOW_CHECK(kName, value.is_object(), "{} must be an object, got {}", full(key), shown(value));
  return value;
}

const nlohmann::json& JsonReader::array(const std::string& key) {
  const nlohmann::json& value = get(key);
  WINNOW_CHECK(kName, value.is_array(), "{} must be a list, got {}", full(key), shown(value));
  return value;
}

std::vector<std::string> JsonReader::strings(const std::string& key) {
  std::vector<std::string> all;
  for (const nlohmann::json& value : array(key)) {
    WINNOW_CHECK(kName, value.is_string(), "entries of {} must be strings, got {}", full(key),
                 shown(value));
    all.push_back(value.get<std::string>());
  }
  return all;
}

std::string JsonReader::string(const std::string& key) {
  const nlohmann::json& value = get(key);
  WINNOW_CHECK(kName, value.is_string(), "{} must be a string, got {}", full(key), shown(value));
  return value.get<std::string>();
}

void JsonReader::refuse_word(const std::string& key, const std::string& text,
                             const std::vector<std::string>& names) const {
  fail(Status::kInvalidArgument, kName, "{} must be one of {}, got {}", full(key), list(names),
       shown(text));
}

void JsonReader::refuse(const std::vector<std::string>& keys, const std::string& why) {
  for (const std::string& key : keys) {
    WINNOW_CHECK(kName, !object_.contains(key), "{} {}, got {}", full(key), why,
                 shown(object_.at(key)));
  }
}

void JsonReader::finish() const {
  for (const auto& [key, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    fail(Status::kInvalidArgument, kName, "{} is not an option; did you mean {}?", shown(full(key)),
         full(nearest_name(key, known_)));
  }
}

}  // namespace winnow::model
