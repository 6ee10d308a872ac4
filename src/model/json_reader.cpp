#include "model/json_reader.h"

#include <algorithm>
#include <limits>

#include "base/text.h"

namespace winnow::model {
namespace {

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

// What stands for an object that could not be read.
const nlohmann::json& nothing() {
  static const nlohmann::json none = nlohmann::json::object();
  return none;
}

}  // namespace

JsonReader::JsonReader(const nlohmann::json& object, std::string path, Rules& rules)
    : object_(object),
      path_(std::move(path)),
      rules_(rules),
      silent_(!object.is_object() || &object == &nothing()) {
  rules.require(object.is_object(), path_.empty() ? "the configuration" : path_, shown(object), "",
                "must be a JSON object");
}

std::string JsonReader::full(const std::string& key) const {
  return path_.empty() ? key : path_ + "." + key;
}

const nlohmann::json* JsonReader::find(const std::string& key) {
  known_.push_back(key);
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

bool JsonReader::has(const std::string& key) { return find(key) != nullptr; }

const nlohmann::json* JsonReader::get(const std::string& key, bool (*fits)(const nlohmann::json&),
                                      const char* kind) {
  const nlohmann::json* value = find(key);
  if (value != nullptr && fits(*value)) return value;
  if (value != nullptr) {
    rules_.require(false, full(key), shown(*value), "", "must be {}", kind);
  } else {
    rules_.require(silent_, full(key), "", "", "is required and has no default");
  }
  rules_.unread(full(key));
  return nullptr;
}

std::int64_t JsonReader::integer(const std::string& key) {
  const auto fits = [](const nlohmann::json& value) {
    return value.is_number_integer() &&
           (!value.is_number_unsigned() ||
            value.get<std::uint64_t>() <=
                static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  };
  const nlohmann::json* value = get(key, fits, "an integer of 64 bit");
  return value == nullptr ? 0 : value->get<std::int64_t>();
}

std::int64_t JsonReader::integer_or(const std::string& key, std::int64_t absent) {
  return has(key) ? integer(key) : absent;
}

double JsonReader::number(const std::string& key) {
  const nlohmann::json* value = get(
      key, [](const nlohmann::json& v) { return v.is_number(); }, "a number");
  return value == nullptr ? 0 : value->get<double>();
}

bool JsonReader::boolean(const std::string& key) {
  const nlohmann::json* value = get(
      key, [](const nlohmann::json& v) { return v.is_boolean(); }, "true or false");
  return value != nullptr && value->get<bool>();
}

const nlohmann::json& JsonReader::object(const std::string& key) {
  const nlohmann::json* value = get(
      key, [](const nlohmann::json& v) { return v.is_object(); }, "an object");
  return value == nullptr ? nothing() : *value;
}

const nlohmann::json& JsonReader::array(const std::string& key) {
  static const nlohmann::json none = nlohmann::json::array();
  const nlohmann::json* value = get(
      key, [](const nlohmann::json& v) { return v.is_array(); }, "a list");
  return value == nullptr ? none : *value;
}

std::vector<std::string> JsonReader::strings(const std::string& key) {
  std::vector<std::string> all;
  for (const nlohmann::json& value : array(key)) {
    rules_.require(value.is_string(), "entries of " + full(key), shown(value), "",
                   "must be strings");
    if (value.is_string()) all.push_back(value.get<std::string>());
  }
  return all;
}

std::string JsonReader::string(const std::string& key) {
  const nlohmann::json* value = get(
      key, [](const nlohmann::json& v) { return v.is_string(); }, "a string");
  return value == nullptr ? "" : value->get<std::string>();
}

void JsonReader::refuse_word(const std::string& key, const std::string& text,
                             const std::vector<std::string>& names) const {
  rules_.require(false, full(key), shown(text), nearest_name(text, names), "must be one of {}",
                 list(names));
  rules_.unread(full(key));
}

void JsonReader::refuse(const std::vector<std::string>& keys, const std::string& why) {
  for (const std::string& key : keys) {
    const auto found = object_.find(key);
    if (found == object_.end()) continue;
    known_.push_back(key);  // and said once
    rules_.require(false, full(key), shown(*found), "leave it out", "{}", why);
  }
}

void JsonReader::finish() const {
  if (!object_.is_object()) return;
  for (const auto& [key, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::string near = full(nearest_name(key, known_));
    rules_.require(false, shown(full(key)), "", near, "is not an option; did you mean {}?", near);
  }
}

}  // namespace winnow::model
