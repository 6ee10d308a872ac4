#include "bench/problem.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>

#include "base/check.h"
#include "base/text.h"
#include "bench/case.h"

namespace winnow::bench {
namespace {

constexpr std::int64_t kMaxNumber = std::int64_t{1} << 31;  // products of two fit into 64 bits

}  // namespace

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
    WINNOW_CHECK("problem", problem.values_.contains(name),
                 "{} has no parameter \"{}\"; did you mean \"{}\"?", problem.operation_, name,
                 nearest_name(name, names));
    problem.values_[name] = word.substr(equals + 1);
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
  const std::string& text = word(name);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  WINNOW_CHECK("problem", error == std::errc() && end == text.data() + text.size(),
               "{} must be a whole number, got \"{}\"", name, text);
  WINNOW_CHECK("problem", std::abs(value) <= kMaxNumber, "{} must be at most 2^31, got {}", name,
               value);
  return value;
}

std::int64_t Problem::positive(const std::string& name) const {
  const std::int64_t value = number(name);
  WINNOW_CHECK("problem", value > 0, "{} must be at least 1, got {}", name, value);
  return value;
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
  for (const std::string& text : words) {
    std::istringstream parts(text);
    for (std::string part; parts >> part;) {
      if (problems.empty() || part.find('=') == std::string::npos) {
        problems.push_back(part);
      } else {
        problems.back() += " " + part;
      }
    }
  }
  return problems;
}

}  // namespace winnow::bench
