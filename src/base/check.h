// Rules that an argument must keep. A broken one throws winnow::Error: "[operation] rule, value".
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "winnow/error.h"
#include "winnow/tensor.h"

namespace winnow {

template <class... A>
[[noreturn]] void fail(Status status, std::string_view operation, fmt::format_string<A...> rule,
                       A&&... values) {
  throw Error(status,
              fmt::format("[{}] {}", operation, fmt::format(rule, std::forward<A>(values)...)));
}

std::string shape_text(const Tensor& t);  // "f32 [4, 16]"
std::string device_text(Device device);   // "cpu", "cuda:0"

}  // namespace winnow

#define WINNOW_CHECK(operation, condition, ...)                                                   \
  do {                                                                                            \
    if (!(condition)) ::winnow::fail(::winnow::Status::kInvalidArgument, operation, __VA_ARGS__); \
  } while (0)

namespace winnow {

// Of functions that run on CPUs alone.
void check_host(std::string_view operation, const char* name, const Tensor& t);
// Checks rank and extents; `layout` is the text of the rule, such as "[rows, heads, dim_v]".
void check_shape(std::string_view operation, const char* name, const Tensor& t,
                 std::initializer_list<std::int64_t> shape, const char* layout);
// Checks the dtype against the allowed ones.
void check_dtype(std::string_view operation, const char* name, const Tensor& t,
                 std::initializer_list<DType> allowed);
// Checks that the last axis has stride 1 (or at most one element).
void check_unit_stride(std::string_view operation, const char* name, const Tensor& t);
// Checks that the bytes from an output's first element to its last are none of the other tensor's.
void check_no_overlap(std::string_view operation, const char* name, const Tensor& output,
                      const char* other_name, const Tensor& other);

}  // namespace winnow
