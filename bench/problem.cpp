#include "bench/problem.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <sstream>

#include "base/check.h"
#include "base/text.h"
#include "bench/case.h"

namespace winnow::bench {
namespace {

// "zeros (a plateau)" -> "zeros"
std::string word_of(const std::string& text) { return text.substr(0, text.find(' ')); }

std::int64_t number_of(const std::string& name, const std::string& text, const Values& allowed) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  WINNOW_CHECK("problem",
               error == std::errc() && end == text.data() + text.size() && value >= allowed.least &&
                   value <= allowed.most,
               "{} must be a whole number from {} to {}, got \"{}\"", name, allowed.least,
               allowed.most, text);
  return value;
}

void check_value(const Parameter& p, const std::string& text) {
  if (p.values.words.empty()) {
    number_of(p.name, text, p.values);
    return;
  }
  std::vector<std::string> words;
  for (const std::string& word : p.values.words) words.push_back(word_of(word));
  WINNOW_CHECK("problem", std::find(words.begin(), words.end(), text) != words.end(),
               "{} must be {}, got \"{}\"", p.name, choice_text(words), text);
}

const Parameter* find_parameter(const std::vector<Parameter>& parameters, const std::string& name) {
  for (const Parameter& p : parameters) {
    if (p.name == name) return &p;
  }
  return nullptr;
}

}  // namespace

Values words(std::vector<std::string> words) { return {0, 0, std::move(words)}; }

std::string Parameter::help() const {
  std::string text = meaning;
  if (values.words.empty()) return text;
  return text + (text.empty() ? "" : ": ") + choice_text(values.words);
}

Problem Problem::parse(const std::string& text) {
  Problem problem;
  std::istringstream words(text);
  words >> problem.operation_;
  const Operation& operation = find_operation(problem.operation_);
  std::vector<std::string> names;
  for (const Parameter& p : operation.parameters) {
    names.emplace_back(p.name);
    problem.values_[p.name] = p.fallback;
  }
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    WINNOW_CHECK("problem", equals != std::string::npos && equals + 1 < word.size(),
                 "every word after the operation must read name=value, got \"{}\"", word);
    WINNOW_CHECK("problem", problem.values_.contains(name), "{} has no parameter \"{}\"; {}",
                 problem.operation_, name, name_hint(name, names));
    problem.values_[name] = word.substr(equals + 1);
    check_value(*find_parameter(operation.parameters, name), problem.values_[name]);
    problem.given_.push_back(name);
  }
  return problem;
}

std::string Problem::text() const {
  std::string text = operation_;
  for (const std::string& name : given_) text += " " + name + "=" + values_.at(name);
  return text;
}

std::int64_t Problem::number(const std::string& name) const {
  using Limits = std::numeric_limits<std::int64_t>;
  return number_of(name, word(name),
                   {Limits::min(), Limits::max()});  // parse has checked the range
}

const std::string& Problem::word(const std::string& name) const {
  const auto it = values_.find(name);
  WINNOW_CHECK("problem", it != values_.end(), "{} has no parameter \"{}\"", operation_, name);
  return it->second;
}

DType Problem::dtype(const std::string& name) const {
  const std::string& text = word(name);
  for (DType d :
       {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE8M0}) {
    if (text == dtype_name(d)) return d;
  }
  fail(Status::kInvalidArgument, "problem",
       "{} must be f64, f32, bf16, f16, e4m3 or e8m0, got \"{}\"", name, text);
}

std::vector<std::string> split_problems(const std::vector<std::string>& words) {
  std::vector<std::string> problems;
  std::vector<Parameter> parameters;  // of the last problem
  for (const std::string& text : words) {
    std::istringstream parts(text);
    for (std::string part; parts >> part;) {
      const bool belongs =
          part.find('=') != std::string::npos || find_parameter(parameters, part) != nullptr;
      if (belongs && !problems.empty()) {
        problems.back() += " " + part;
        continue;
      }
      problems.push_back(part);
      parameters.clear();
      for (const Operation& operation : operations()) {
        if (operation.name == part) parameters = operation.parameters;
      }
    }
  }
  WINNOW_CHECK("problem", words.empty() || !problems.empty(),
               "a problem must begin with an operation, got \"{}\"", words.front());
  return problems;
}

}  // namespace winnow::bench
