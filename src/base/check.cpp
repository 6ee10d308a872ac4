#include "base/check.h"

#include <cstdint>
#include <numeric>

namespace winnow {
namespace {

constexpr std::int64_t kMaxExtent = (std::int64_t{1} << 31) - 1;  // indices of one axis fit an int

// First and one-past-last byte that the view can touch.
struct Span {
  std::uintptr_t first, last;
};
Span span_of(const Tensor& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  if (t.data == nullptr || t.elements() == 0) return {base, base};
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank; ++i) {
    const std::int64_t reach = (t.shape[i] - 1) * t.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t size = dtype_bytes(t.dtype);
  return {base + static_cast<std::uintptr_t>(low * size),
          base + static_cast<std::uintptr_t>((high + 1) * size)};
}

// Views whose rows come at a common distance, each within a part of it that the other leaves free,
// such as codes and scales side by side in the rows of a cache.
bool interleaved(const Tensor& a, const Tensor& b) {
  std::int64_t distance = 0;
  // What the tensor takes of a distance, from where on.
  const auto part = [&distance](const Tensor& t) {
    const std::int64_t bytes = dtype_bytes(t.dtype);
    const bool runs = t.rank > 0 && t.strides[t.rank - 1] == 1;
    for (int axis = 0; axis < t.rank - (runs ? 1 : 0); ++axis) {
      if (t.shape[axis] > 1) distance = std::gcd(distance, t.strides[axis] * bytes);
    }
    return runs ? t.shape[t.rank - 1] * bytes : bytes;
  };
  const std::int64_t a_bytes = part(a), b_bytes = part(b);
  if (distance == 0) return false;
  const std::int64_t apart = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(b.data) -
                                                       reinterpret_cast<std::intptr_t>(a.data)) %
                             distance;
  const std::int64_t after = apart < 0 ? apart + distance : apart;
  return after >= a_bytes && after + b_bytes <= distance;
}

}  // namespace

std::string device_text(Device device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

std::string shape_text(const Tensor& t) {
  if (t.empty()) return "nothing";
  std::string text = fmt::format("{} [", dtype_name(t.dtype));
  for (int i = 0; i < t.rank; ++i) text += fmt::format("{}{}", i > 0 ? ", " : "", t.shape[i]);
  return text + "]";
}

void check_host(std::string_view operation, const char* name, const Tensor& t) {
  if (t.device.kind == Device::Kind::kCpu) return;
  fail(Status::kUnsupported, operation, "{} must lie in CPU memory, got device {}", name,
       device_text(t.device));
}

void check_shape(std::string_view operation, const char* name, const Tensor& t,
                 std::initializer_list<std::int64_t> shape, const char* layout) {
  bool ok = t.rank == static_cast<int>(shape.size());
  int axis = 0;
  for (std::int64_t extent : shape) {
    if (!ok) break;
    const std::int64_t actual = t.shape[axis++];
    ok = actual >= 0 && (extent < 0 || extent == actual);
  }
  if (ok) {
    for (int i = 0; i < t.rank; ++i) {
      WINNOW_CHECK(operation, t.shape[i] <= kMaxExtent,
                   "{} must have extents of at most {}, got {}", name, kMaxExtent, shape_text(t));
    }
    return;
  }
  std::string wanted;
  for (std::int64_t extent : shape) {
    wanted += (wanted.empty() ? "" : ", ") +
              (extent < 0 ? std::string("any") : fmt::format("{}", extent));
  }
  fail(Status::kInvalidArgument, operation, "{} must be {} = [{}], got {}", name, layout, wanted,
       shape_text(t));
}

void check_dtype(std::string_view operation, const char* name, const Tensor& t,
                 std::initializer_list<DType> allowed) {
  for (DType dtype : allowed) {
    if (t.dtype == dtype) return;
  }
  std::string names;  // only now: a call allocates nothing
  for (DType dtype : allowed) {
    names += (names.empty() ? "" : ", ") + std::string(dtype_name(dtype));
  }
  fail(Status::kInvalidArgument, operation, "{} must be of dtype {}, got {}", name, names,
       dtype_name(t.dtype));
}

void check_unit_stride(std::string_view operation, const char* name, const Tensor& t) {
  WINNOW_CHECK(operation, t.rank > 0 && (t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1),
               "{} must have stride 1 on its last axis, got {}", name,
               t.rank > 0 ? t.strides[t.rank - 1] : 0);
}

void check_no_overlap(std::string_view operation, const char* name, const Tensor& output,
                      const char* other_name, const Tensor& other) {
  const Span a = span_of(output), b = span_of(other);
  WINNOW_CHECK(operation,
               a.last <= b.first || b.last <= a.first || a.first == a.last || b.first == b.last ||
                   interleaved(output, other),
               "{} must not share memory with {}, but they overlap", name, other_name);
}

}  // namespace winnow
