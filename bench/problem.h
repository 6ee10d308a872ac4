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

// What a parameter may be: a whole number of a range, or one of some words. A word may be followed by
// a remark: "zeros (a plateau)".
struct Values {
  std::int64_t least = 0, most = std::int64_t{1} << 31;  // products of two fit into 64 bits
  std::vector<std::string> words{};
};
inline const Values kAny;            // a size: the rules on it are the operation's
inline const Values kPositive{1};    // what something is divided by
inline const Values kDefaulted{-1};  // -1 stands for something else
inline const Values kFlag{0, 1};
inline const Values kInt32{0, (std::int64_t{1} << 31) - 1};
inline const Values kBytes{0, std::int64_t{1} << 62};
Values words(std::vector<std::string> words);

struct Parameter {
  const char* name;
  const char* fallback;  // its default, as text
  const char* meaning;   // shown by `winnow why`, before the words
  Values values = kAny;

  std::string help() const;
};

// Words that several operations share.
inline const Values kRanges = words({"full", "causal", "packed", "awkward"});
inline const Values kIds = words({"ascending", "scattered", "popular"});
inline const Values kFloats = words({"f64", "f32", "bf16", "f16"});
inline const Values kScorerDtypes = words({"f64", "f32", "bf16", "f16", "e4m3 (FP8)", "mxfp8"});

class Problem {
 public:
  // Throws with the valid names if `text` names an unknown operation, parameter or word, and with
  // the range if a number lies outside.
  static Problem parse(const std::string& text);

  const std::string& operation() const { return operation_; }
  std::string text() const;  // the operation and every parameter that differs from its default

  std::int64_t number(const std::string& name) const;
  const std::string& word(const std::string& name) const;
  bool flag(const std::string& name) const { return number(name) != 0; }
  DType dtype(const std::string& name = "dtype") const;

 private:
  std::string operation_;
  std::map<std::string, std::string> values_;
  std::vector<std::string> given_;  // in the order of the text
};

// Problems out of the words of a command line, quoted or not: a word without "=" begins the next,
// unless it is a parameter whose value was forgotten.
std::vector<std::string> split_problems(const std::vector<std::string>& words);

}  // namespace winnow::bench
