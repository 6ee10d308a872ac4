// Sums and maxima over a block of 256 threads, in a fixed tree: lanes of a warp, then warps.
#pragma once

namespace winnow::cuda {

inline constexpr int kSumThreads = 256, kSumWarps = kSumThreads / 32;

// The sum over the block, to all its threads.
__device__ inline double block_sum(double x) {
  __shared__ double parts[kSumWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  __syncthreads();  // all are done with the sum before
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) x += parts[w];
  return x;
}

// The largest over the block; NaN never is.
__device__ inline float block_maximum(float x) {
  __shared__ float parts[kSumWarps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  __syncthreads();  // all are done with the one before
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
#pragma unroll
  for (int w = 1; w < kSumWarps; ++w) x = fmaxf(x, parts[w]);
  return x;
}

}  // namespace winnow::cuda
