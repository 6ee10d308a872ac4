// The storage types of a call, as types and by value; rows of any rank.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/numbers.h"
#include "winnow/tensor.h"

namespace winnow::cuda {

// visit(T{}) with the type of a dtype that kernels compute from: f32, bf16 or f16.
template <class Visit>
void with_element(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF32: return visit(float{});
    case DType::kBF16: return visit(BF16{});
    case DType::kF16: return visit(F16{});
    default: return;
  }
}

// One rounding from f32.
template <class T>
__device__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, BF16>) return to_bf16(x);
  if constexpr (std::is_same_v<T, F16>) return to_f16(x);
}

// Element `i` from `data`, where the type costs less as a branch than as an instantiation.
__device__ inline float load_float(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kBF16: return to_float(static_cast<const BF16*>(data)[i]);
    default: return to_float(static_cast<const F16*>(data)[i]);
  }
}
__device__ inline void store_float(void* data, DType dtype, std::int64_t i, float x) {
  switch (dtype) {
    case DType::kF32: static_cast<float*>(data)[i] = x; break;
    case DType::kBF16: static_cast<BF16*>(data)[i] = to_bf16(x); break;
    default: static_cast<F16*>(data)[i] = to_f16(x); break;
  }
}

// Where the rows of a tensor [.., dim] begin, counted over its leading axes.
struct Rows {
  std::int64_t extent[kMaxRank - 1] = {1, 1, 1}, stride[kMaxRank - 1] = {};  // the last axis first

  explicit Rows(const Tensor& t) {
    for (int axis = t.rank - 2, n = 0; axis >= 0; --axis, ++n) {
      extent[n] = t.shape[axis];
      stride[n] = t.strides[axis];
    }
  }
  __host__ __device__ std::int64_t count() const { return extent[0] * extent[1] * extent[2]; }
  __device__ std::int64_t offset(std::int64_t row) const {
    if (extent[1] == 1 && extent[2] == 1) return row * stride[0];
    const std::int64_t above = row / extent[0];
    return row % extent[0] * stride[0] + above % extent[1] * stride[1] +
           above / extent[1] * stride[2];
  }
};

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline bool has_unit_stride(const Tensor& t) {
  return t.empty() || t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1;
}

}  // namespace winnow::cuda
