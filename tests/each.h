// Runs one call with every implementation that accepts it.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "base/array.h"
#include "base/numbers.h"
#include "winnow/implementations.h"
#include "winnow/threads.h"

namespace winnow::testing {

// body(implementation) for each that accepts, pinned to it meanwhile. At least the reference does.
template <class Args, class Body>
void for_each_implementation(const Args& args, Body&& body) {
  const Explanation all = explain(args);
  int accepted = 0;
  for (const Verdict& v : all.verdicts) {
    if (!v.refusal.empty()) continue;
    ++accepted;
    pin_implementation(all.operation, v.implementation);
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, all.operation + " " + v.implementation);
    body(v.implementation);
    pin_implementation(all.operation, "");
  }
  EXPECT_GE(accepted, 1);
}

class ThreadsGuard {
 public:
  explicit ThreadsGuard(int threads) : before_(num_threads()) { set_num_threads(threads); }
  ~ThreadsGuard() { set_num_threads(before_); }
  ThreadsGuard(const ThreadsGuard&) = delete;
  ThreadsGuard& operator=(const ThreadsGuard&) = delete;

 private:
  int before_;
};

// A contiguous array of the given floating dtype.
inline Array floats(DType dtype, std::initializer_list<std::int64_t> shape,
                    std::initializer_list<double> values) {
  Array a(dtype, shape);
  EXPECT_EQ(a.elements(), static_cast<std::int64_t>(values.size()));
  std::int64_t i = 0;
  for (double x : values) store_double(a.view().data, dtype, i++, x);
  return a;
}

inline Array ints(std::initializer_list<std::int64_t> shape,
                  std::initializer_list<std::int32_t> values) {
  Array a(DType::kI32, shape);
  EXPECT_EQ(a.elements(), static_cast<std::int64_t>(values.size()));
  std::int64_t i = 0;
  for (std::int32_t x : values) a.as<std::int32_t>()[i++] = x;
  return a;
}

inline double at(const Array& a, std::int64_t i) {
  return load_double(a.view().data, a.view().dtype, i);
}

// The message of the error that `call` throws; "" if it throws none.
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

}  // namespace winnow::testing
