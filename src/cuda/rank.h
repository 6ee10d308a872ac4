// The order of a selection as one number: the k best candidates of a row have the k largest ranks.
//
// High word: the bits of the score as f32, made monotone, with +0 == -0. Low word: ~id. Ranks are
// unique, so "lowest ids at the cutoff" is part of the number and needs no code. A kept key, a member
// whatever its score, ranks above +inf.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace winnow::cuda {

using U32 = std::uint32_t;
using U64 = std::uint64_t;

// x: the bits of the score as f32, which is not NaN; y: the id, with kKept set for a kept key.
using Candidate = uint2;

constexpr U32 kAllLanes = 0xffffffffu;
constexpr U32 kKept = 0x80000000u;
constexpr U32 kKeptKey = 0xffffffffu;
constexpr float kLargestFloat = 3.402823466e38f;

// The lowest rank of a candidate: that of -FLT_MAX at any id, or of -inf.
constexpr U64 kLowestFinite = 0x0080000000000000u;
constexpr U64 kLowestInfinite = 0x007fffff00000000u;

__device__ __forceinline__ U32 key_of(U32 bits) {
  bits = __float_as_uint(__fadd_rn(__uint_as_float(bits), 0.0f));  // -0 becomes +0
  return bits ^ (static_cast<U32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
// The smallest float of a key; NaN, which nothing reaches, past +inf.
__device__ __forceinline__ float value_of(U32 key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ U64 rank_at(U32 key, U32 low) {
  return static_cast<U64>(key) << 32 | low;
}
__device__ __forceinline__ U64 rank_of(Candidate c) {
  return rank_at((c.y & kKept) != 0 ? kKeptKey : key_of(c.x), ~c.y);
}
__device__ __forceinline__ U32 key_in(U64 rank) { return static_cast<U32>(rank >> 32); }
// Up to this id a value equal to the rank's reaches the rank.
__device__ __forceinline__ U32 id_in(U64 rank) { return ~static_cast<U32>(rank); }

// What a score must reach, at ids from `id` on, for its rank to reach the limit.
__device__ __forceinline__ float threshold(U64 limit, U32 id) {
  return value_of(id > id_in(limit) ? key_in(limit) + 1 : key_in(limit));
}

}  // namespace winnow::cuda
