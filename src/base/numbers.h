// The 16-bit and 8-bit number types and conversions between all storage types and double or float.
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
struct E4M3 {
  std::uint8_t bits = 0;
};
struct E8M0 {
  std::uint8_t bits = 0;
};
inline constexpr float kLargestE4M3 = 448;

constexpr float to_float(float x) { return x; }
constexpr float to_float(double x) { return static_cast<float>(x); }
constexpr float to_float(BF16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
constexpr float to_float(F16 x) {
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
constexpr float to_float(E4M3 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x80u} << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {  // zero or subnormal: fraction * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}
constexpr float to_float(E8M0 x) {
  if (x.bits == 0xff) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(x.bits == 0 ? 0x00400000u : std::uint32_t{x.bits} << 23);
}

// Round to nearest even; NaN stays a quiet NaN.
constexpr BF16 to_bf16(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
constexpr F16 to_f16(float x) {
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

// Round to nearest even and saturate: there is no infinity, so whatever exceeds 448 becomes 448,
// infinities included.
constexpr E4M3 to_e4m3(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint8_t>((u >> 24) & 0x80u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<std::uint8_t>(sign | 0x7eu)};  // >= 448
  if (magnitude < 0x3c800000u) {  // below 2^-6: the sum aligns the fraction, rounding to even
    const float aligned = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {
        static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x46800000u))};
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return {static_cast<std::uint8_t>(sign | ((rounded - (120u << 23)) >> 20))};
}
// The nearest power of two that is not below x, from 2^-127 to 2^127; NaN for NaN, for infinity,
// for what is larger and for negative numbers.
constexpr E8M0 to_e8m0(float x) {
  const auto u = std::bit_cast<std::uint32_t>(x);
  if (u == 0x80000000u || u <= 0x00400000u) return {0};  // up to 2^-127, and both zeros
  if (u > 0x7f000000u) return {0xff};
  return {static_cast<std::uint8_t>((u + 0x7fffffu) >> 23)};
}

// To float such that rounding that on to a type of at most 22 significant bits is one rounding:
// what float cannot hold goes to the neighbour with the odd fraction, never to a tie.
constexpr float to_odd_float(double x) {
  const auto nearest = static_cast<float>(x);
  const auto u = std::bit_cast<std::uint32_t>(nearest);
  const double back = nearest;
  if (back == x || x != x || (u & 1u) != 0) return nearest;
  const bool below = (back < 0 ? -back : back) < (x < 0 ? -x : x);
  return std::bit_cast<float>(below ? u + 1 : u - 1);
}

// Every conversion is one rounding.
template <class T>
constexpr T from_double(double x) {
  if constexpr (std::is_same_v<T, double>) return x;
  if constexpr (std::is_same_v<T, float>) return static_cast<float>(x);
  if constexpr (std::is_same_v<T, F16>) return to_f16(to_odd_float(x));
  if constexpr (std::is_same_v<T, BF16>) return to_bf16(to_odd_float(x));
  if constexpr (std::is_same_v<T, E4M3>) return to_e4m3(to_odd_float(x));
}

constexpr double to_double(double x) { return x; }
constexpr double to_double(float x) { return x; }
constexpr double to_double(BF16 x) { return to_float(x); }
constexpr double to_double(F16 x) { return to_float(x); }
constexpr double to_double(E4M3 x) { return to_float(x); }
constexpr double to_double(E8M0 x) { return to_float(x); }

// A dtype to compute with. E4M3 and E8M0 mean something only together: data and scale.
constexpr bool is_float(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

// One element of a floating tensor as double, by its address.
constexpr double load_double(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64: return static_cast<const double*>(data)[index];
    case DType::kF32: return static_cast<const float*>(data)[index];
    case DType::kBF16: return to_float(static_cast<const BF16*>(data)[index]);
    case DType::kF16: return to_float(static_cast<const F16*>(data)[index]);
    case DType::kE4M3: return to_float(static_cast<const E4M3*>(data)[index]);
    case DType::kE8M0: return to_float(static_cast<const E8M0*>(data)[index]);
    default: return 0;
  }
}
inline void store_double(void* data, DType dtype, std::int64_t index, double x) {
  switch (dtype) {
    case DType::kF64: static_cast<double*>(data)[index] = x; break;
    case DType::kF32: static_cast<float*>(data)[index] = static_cast<float>(x); break;
    case DType::kBF16: static_cast<BF16*>(data)[index] = from_double<BF16>(x); break;
    case DType::kF16: static_cast<F16*>(data)[index] = from_double<F16>(x); break;
    case DType::kE4M3: static_cast<E4M3*>(data)[index] = from_double<E4M3>(x); break;
    case DType::kE8M0: static_cast<E8M0*>(data)[index] = to_e8m0(static_cast<float>(x)); break;
    default: break;
  }
}

}  // namespace winnow
