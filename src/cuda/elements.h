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

// kCount elements from `data + first`, of which those past `limit` are 0; in words of 16 or 8 bytes
// where the address allows. kCount: a multiple of 4.
template <int kCount>
__device__ void load_floats(const void* data, DType dtype, std::int64_t first, int limit,
                            float (&x)[kCount]) {
  const char* p = static_cast<const char*>(data) + first * (dtype == DType::kF32 ? 4 : 2);
  if (limit < kCount || reinterpret_cast<std::uintptr_t>(p) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = i < limit ? load_float(data, dtype, first + i) : 0.f;
  } else if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(p + 4 * i);
  } else {
    const bool bf16 = dtype == DType::kBF16;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint2 word = *reinterpret_cast<const uint2*>(p + 2 * i);
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const std::uint32_t pair = half < 2 ? word.x : word.y;
        const auto bits = static_cast<std::uint16_t>(half % 2 == 0 ? pair : pair >> 16);
        x[i + half] = bf16 ? to_float(BF16{bits}) : to_float(F16{bits});
      }
    }
  }
}

template <int kCount>
__device__ void store_floats(void* data, DType dtype, std::int64_t first, int limit,
                             const float (&x)[kCount]) {
  char* p = static_cast<char*>(data) + first * (dtype == DType::kF32 ? 4 : 2);
  if (limit < kCount || reinterpret_cast<std::uintptr_t>(p) % 16 != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i < limit) store_float(data, dtype, first + i, x[i]);
  } else if (dtype == DType::kF32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      *reinterpret_cast<float4*>(p + 4 * i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  } else {
    const bool bf16 = dtype == DType::kBF16;
    auto bits = [&](float value) -> std::uint32_t {
      return bf16 ? to_bf16(value).bits : to_f16(value).bits;
    };
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<uint2*>(p + 2 * i) =
          make_uint2(bits(x[i]) | bits(x[i + 1]) << 16, bits(x[i + 2]) | bits(x[i + 3]) << 16);
    }
  }
}

// Where the rows of a tensor [.., dim] begin, counted over its leading axes. Axes that lie one
// inside the other are one: the others cost a division.
struct Rows {
  std::int64_t extent[kMaxRank - 1] = {1, 1, 1}, stride[kMaxRank - 1] = {};  // the last axis first

  explicit Rows(const Tensor& t) {
    int n = 0;
    for (int axis = t.rank - 2; axis >= 0; --axis) {
      if (t.shape[axis] == 1) continue;
      if (n > 0 && t.strides[axis] == extent[n - 1] * stride[n - 1]) {
        extent[n - 1] *= t.shape[axis];
        continue;
      }
      extent[n] = t.shape[axis];
      stride[n++] = t.strides[axis];
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
