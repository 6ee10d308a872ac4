// Pieces of eight channels, as the scorers load them, and E4M3 as bf16.
//
// E4M3 times a power of two is exact in bf16, unless it falls below bf16's range. In MXFP8 the powers of
// two of a row and of a key are therefore taken relative to the largest of the row and of the key, which
// multiply the finished score.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/numbers.h"

namespace winnow::cuda {

// Eight elements from p, of which `count` exist; the others are 0.
template <class T>
using Chunk = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
template <class T>
__device__ Chunk<T> load_chunk(const T* p, int count) {
  using Words = Chunk<T>;
  if (count >= 8 && reinterpret_cast<std::uintptr_t>(p) % sizeof(Words) == 0) {
    return *reinterpret_cast<const Words*>(p);
  }
  std::uint64_t halves[2] = {};
  for (int i = 0; i < 8; ++i) {
    if (i >= count) break;
    constexpr int kBits = 8 * sizeof(T), kEach = 64 / kBits;
    halves[i / kEach] |= static_cast<std::uint64_t>(p[i].bits) << i % kEach * kBits;
  }
  auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
  if constexpr (sizeof(T) == 1)
    return {low(halves[0]), high(halves[0])};
  else
    return {low(halves[0]), high(halves[0]), low(halves[1]), high(halves[1])};
}

constexpr int kBias = 120;  // the bits of E4M3 in the place of bf16's are 2^-120 of the number

constexpr std::uint32_t kUnscaled = (127 + kBias) << 7;  // the power of codes without scales

// 2^(120 + scale - largest) in bf16; below the smallest, 0. NaN for the scale NaN.
__device__ inline std::uint32_t power_bits(E8M0 scale, int largest) {
  if (scale.bits == 255) return 0x7fff;
  const int field = 127 + kBias + scale.bits - largest;
  return field > 0 ? field << 7 : field > -7 ? 0x40 >> -field : 0;
}
// Two codes, in the high bytes of both halves, times a power of two: exact, or bf16's one rounding.
__device__ inline std::uint32_t code_pair_to_bf16(std::uint32_t codes, std::uint32_t power) {
  const std::uint32_t x = (codes & 0x80008000u) | (codes & 0x7f007f00u) >> 4;
  std::uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(power * 0x10001u), "r"(0x80008000u));
  return y;
}
__device__ inline uint4 codes_to_bf16(uint2 codes, std::uint32_t power) {
  auto nans = [](std::uint32_t x) { return ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; };
  auto low = [](std::uint32_t x) { return __byte_perm(x, 0, 0x1404); };
  auto high = [](std::uint32_t x) { return __byte_perm(x, 0, 0x3424); };
  uint4 y = {code_pair_to_bf16(low(codes.x), power), code_pair_to_bf16(high(codes.x), power),
             code_pair_to_bf16(low(codes.y), power), code_pair_to_bf16(high(codes.y), power)};
  const std::uint32_t nan_x = nans(codes.x), nan_y = nans(codes.y);
  if ((nan_x | nan_y) != 0) {
    auto patch = [](std::uint32_t halves) { return (halves >> 15 & 0x00010001u) * 0x7fffu; };
    y.x |= patch(low(nan_x));
    y.y |= patch(high(nan_x));
    y.z |= patch(low(nan_y));
    y.w |= patch(high(nan_y));
  }
  return y;
}
// The largest of `count` scales that are numbers.
__device__ inline int largest_scale(const E8M0* scales, int count) {
  int largest = 0;
  for (int g = 0; g < count; ++g) {
    const int bits = scales[g].bits;
    if (bits != 255 && bits > largest) largest = bits;
  }
  return largest;
}

}  // namespace winnow::cuda
