// The problem grammar that tests, `winnow check`, `winnow bench` and `winnow why` share:
//   "index_topk rows=16 keys=32768 index_heads=64 dtype=bf16"
// An operation, then name=value pairs; what is left out takes the operation's default.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::bench {

struct Parameter {
  const char* name;
  const char* fallback;  // its default, as text
  const char* meaning;   // shown by `winnow why`
};

class Problem {
 public:
  // Throws with the nearest valid name if `text` names an unknown operation or parameter.
  static Problem parse(const std::string& text);

  const std::string& operation() const { return operation_; }
  std::string text() const;  // the operation and every parameter that differs from its default

  std::int64_t number(const std::string& name) const;
  std::int64_t positive(const std::string& name) const;  // of what something is divided by
  const std::string& word(const std::string& name) const;
  bool flag(const std::string& name) const { return number(name) != 0; }
  DType dtype(const std::string& name = "dtype") const;

 private:
  std::string operation_;
  std::map<std::string, std::string> values_;
  std::vector<std::string> given_;  // in the order of the text
};

// Problems out of the words of a command line, quoted or not: a word without "=" begins the next.
std::vector<std::string> split_problems(const std::vector<std::string>& words);

}  // namespace winnow::bench
