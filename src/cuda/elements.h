// The storage types of a call, as types.
#pragma once

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

inline bool has_unit_stride(const Tensor& t) {
  return t.empty() || t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1;
}

}  // namespace winnow::cuda
