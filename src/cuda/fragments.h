// Tiles of 16-bit numbers in shared memory: rows copied into them, fragments of mma.m16n8k16
// (mma.h) read out of them, and numbers rounded back into them.
//
// Rows lie an odd multiple of 16 bytes apart (`padded`), so that the 8 rows of a matrix fall into
// different banks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/mma.h"

namespace winnow::cuda {

// The row stride of a tile of 16-bit numbers: channels up to a multiple of 16, and 16 bytes.
__host__ __device__ constexpr int padded(int channels) { return (channels + 15) / 16 * 16 + 8; }

// 16 bytes into shared memory, of which the first `bytes` are read and the rest are zeros.
__device__ inline void copy_async(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void copy_async(void* to, const void* from, int bytes) {
  copy_async(shared_address(to), from, bytes);
}
__device__ inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ inline void load_matrices(std::uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row)));
}
__device__ inline void load_transposed(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// A of 16 rows x 16 channels: rows of the tile are rows of A.
template <class T>
__device__ void load_a(std::uint32_t (&a)[4], const T* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, tile + lane % 16 * stride + lane / 16 * 8);
}
// A of 16 rows x 16 channels: rows of the tile are columns of A.
template <class T>
__device__ void load_a_transposed(std::uint32_t (&a)[4], const T* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load_transposed(a, tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}
// B of 16 columns x 16 channels: rows of the tile are columns of B. b[0], b[1]: the first 8
// columns.
template <class T>
__device__ void load_b(std::uint32_t (&b)[4], const T* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, tile + (lane / 16 * 8 + lane % 8) * stride + lane / 8 % 2 * 8);
}
// The same of 8 columns.
template <class T>
__device__ void load_b(std::uint32_t (&b)[2], const T* tile, int stride) {
  const int lane = threadIdx.x % 16;
  load_matrices(b, tile + lane % 8 * stride + lane / 8 * 8);
}
// B of 16 rows x 16 columns: rows of the tile are rows of B. b[0], b[1]: the first 8 columns.
template <class T>
__device__ void load_b_transposed(std::uint32_t (&b)[4], const T* tile, int stride) {
  const int lane = threadIdx.x % 32;
  load_transposed(b, tile + lane % 16 * stride + lane / 16 * 8);
}

// d += a b, of BF16 or F16.
template <class T>
__device__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                             std::uint32_t b1) {
  mma<T>(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Two numbers rounded to BF16 or F16, the first in the low half.
template <class T>
__device__ std::uint32_t pack(float low, float high) {
  std::uint32_t bits;
  if constexpr (std::is_same_v<T, BF16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

}  // namespace winnow::cuda
