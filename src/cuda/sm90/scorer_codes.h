// FP8 and MXFP8 of the scorer as bf16 in scratch, exactly (chunk.h), with the powers of two that multiply
// finished scores.
#pragma once

#include "cuda/chunk.h"
#include "cuda/sm90/scorer.h"

namespace winnow::cuda::sm90 {

inline constexpr int kChunks = kScorerDim / 8, kGroups = kScorerDim / 32;  // of a head or key

// The codes of a row's heads, [rows][heads][128], and the exponent of its largest scale; a block a row.
static __global__ void __launch_bounds__(256)
    widen_queries(const __grid_constant__ Scorer s, uint4* to, std::int32_t* exponent) {
  const std::int64_t row = s.first_row + blockIdx.x;
  const E8M0* scales = s.query_scale + row * s.query_scale_row;
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  if (s.query_scale != nullptr) {
    for (int h = threadIdx.x; h < s.heads; h += blockDim.x)
      atomicMax(&largest, largest_scale(scales + h * s.query_scale_head, kGroups));
  }
  __syncthreads();
  if (threadIdx.x == 0) exponent[blockIdx.x] = largest - 127;
  for (int i = threadIdx.x; i < s.heads * kChunks; i += blockDim.x) {
    const int head = i / kChunks, chunk = i % kChunks;
    const auto* codes =
        static_cast<const E4M3*>(s.query) + row * s.query_row + head * s.query_head + 8 * chunk;
    const std::uint32_t power =
        s.query_scale == nullptr
            ? kUnscaled
            : power_bits(scales[head * s.query_scale_head + chunk / 4], largest);
    to[static_cast<std::int64_t>(blockIdx.x) * s.heads * kChunks + i] =
        codes_to_bf16(load_chunk(codes, 8), power);
  }
}

// The codes of the call's keys, [keys][128], and the exponents of their largest scales.
static __global__ void __launch_bounds__(256)
    widen_keys(const __grid_constant__ Scorer s, uint4* to, std::int32_t* exponent) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t key = s.first_key + i / kChunks;
  const int chunk = static_cast<int>(i % kChunks);
  if (key >= s.last_key) return;
  std::uint32_t power = kUnscaled;
  if (s.query_scale != nullptr) {
    const auto* scales = static_cast<const E8M0*>(s.key_scale) + key * s.scale_places.key_stride;
    const int largest = largest_scale(scales, kGroups);
    power = power_bits(scales[chunk / 4], largest);
    if (chunk == 0) exponent[i / kChunks] = largest - 127;
  }
  const auto* codes = static_cast<const E4M3*>(s.key) + key * s.places.key_stride + 8 * chunk;
  to[i] = codes_to_bf16(load_chunk(codes, 8), power);
}

}  // namespace winnow::cuda::sm90
