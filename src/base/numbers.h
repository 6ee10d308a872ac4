// The 16-bit number types and conversions between all storage types and double or float.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "winnow/tensor.h"

namespace winnow {

struct BF16 {
  std::uint16_t bits = 0;
};
struct F16 {
  std::uint16_t bits = 0;
};

inline float to_float(float x) { return x; }
inline float to_float(double x) { return static_cast<float>(x); }
inline float to_float(BF16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline float to_float(F16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// Round to nearest even; NaN stays a quiet NaN.
inline BF16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
inline F16 to_f16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // >= 65536
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum aligns the fraction, rounding to even
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {
        static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

template <class T>
inline T from_double(double x) {
  if constexpr (sizeof(T) == 8) return x;
  // Through float: two roundings, which can differ from a single one by one unit of the
  // 16-bit type.
  else if constexpr (sizeof(T) == 4)
    return static_cast<float>(x);
  else if constexpr (std::is_same_v<T, F16>)
    return to_f16(static_cast<float>(x));
  else
    return to_bf16(static_cast<float>(x));
}

inline double to_double(double x) { return x; }
inline double to_double(float x) { return x; }
inline double to_double(BF16 x) { return to_float(x); }
inline double to_double(F16 x) { return to_float(x); }

inline bool is_float(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

// One element of a floating tensor as double, by its address.
inline double load_double(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[index];
    case DType::kF32: return static_cast<const float*>(data)[index];
    case DType::kBF16: return to_float(static_cast<const BF16*>(data)[index]);
    case DType::kF16: return to_float(static_cast<const F16*>(data)[index]);
    default: return 0;
  }
}
inline void store_double(void* data, DType dtype, std::int64_t index, double x) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[index] = x; break;
    case DType::kF32: static_cast<float*>(data)[index] = static_cast<float>(x); break;
    case DType::kBF16: static_cast<BF16*>(data)[index] = to_bf16(static_cast<float>(x)); break;
    case DType::kF16: static_cast<F16*>(data)[index] = to_f16(static_cast<float>(x)); break;
    default: break;
  }
}

}  // namespace winnow
