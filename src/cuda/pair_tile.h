// Dot products of up to 64 heads of a row with 64 gathered keys: a tile of pairs (head, slot), in
// f32 registers of 4 warps. What attention_target and the backward operations score with.
//
// Both operands stream through shared memory, 128 bytes of each row at a time in two stages, so any
// number of channels fits any device. 16-bit numbers are multiplied on tensor cores (a chain of
// mma.m16n8k16 over channels ascending), f32 by FMAs (one chain over channels ascending); rows of
// another type are rounded on the way.
//
// The tile lies in fragments of mma (mma.h) in either case: c[m][n][e] of lane l is
//   head 16 (m + kMTiles * warp row) + l / 4 + 8 (e / 2), slot 8 (n + kNTiles * warp column) + 2 (l
//   % 4) + e % 2.
#pragma once

#include "cuda/attention.h"

namespace winnow::cuda {

inline constexpr int kPairSlots = 64;  // of a tile
inline constexpr int kPairThreads = 128;

// The heads of a tile: 64, or 16 where a key has no more.
template <class Visit>
void with_pair_heads(std::int64_t group, Visit&& visit) {
  if (group <= 16) return visit(std::integral_constant<int, 16>{});
  return visit(std::integral_constant<int, 64>{});
}

// Rows in memory: row r at data + r * stride, or at data + places[r] (-1: missing, zeros).
template <class T>
struct GatheredRows {
  const T* data;
  std::int64_t stride;
  const std::int64_t* places;  // in shared memory; null: strided
  int count;                   // the others are zeros
  bool vectors;                // rows begin at multiples of 16 bytes

  __device__ const T* operator[](int r) const {
    if (r >= count) return nullptr;
    if (places == nullptr) return data + r * stride;
    return places[r] < 0 ? nullptr : data + places[r];
  }
};

template <class T, int kHeads>
struct PairTile {
  static constexpr int kWarpRows = kHeads == 64 ? 2 : 1, kWarpColumns = 4 / kWarpRows;
  static constexpr int kMTiles = kHeads / 16 / kWarpRows, kNTiles = 8 / kWarpColumns;
  static constexpr int kChunk = 128 / static_cast<int>(sizeof(T));           // channels of a stage
  static constexpr int kStride = kChunk + 16 / static_cast<int>(sizeof(T));  // of a row of it

  struct Memory {
    alignas(16) T heads[2][kHeads * kStride];
    alignas(16) T slots[2][kPairSlots * kStride];
  };

  float c[kMTiles][kNTiles][4] = {};

  __device__ static int warp_row() { return threadIdx.x / 32 / kWarpColumns; }
  __device__ static int warp_column() { return threadIdx.x / 32 % kWarpColumns; }
  __device__ static int head(int m, int e) {
    return 16 * (m + kMTiles * warp_row()) + threadIdx.x % 32 / 4 + e / 2 * 8;
  }
  __device__ static int slot(int n, int e) {
    return 8 * (n + kNTiles * warp_column()) + threadIdx.x % 4 * 2 + e % 2;
  }

  // c += left right^T over `dim` channels. All threads call it; ends with a barrier.
  template <class Left, class Right>
  __device__ void add(Memory& memory, const GatheredRows<Left>& left,
                      const GatheredRows<Right>& right, int dim) {
    const int steps = (dim + kChunk - 1) / kChunk;
    stage(memory, left, right, 0, dim);
    for (int step = 0; step < steps; ++step) {
      copies_wait<0>();
      __syncthreads();
      if (step + 1 < steps) stage(memory, left, right, step + 1, dim);
      const T* a = memory.heads[step % 2] + 16 * kMTiles * warp_row() * kStride;
      const T* b = memory.slots[step % 2] + 8 * kNTiles * warp_column() * kStride;
      const int width = min(kChunk, dim - step * kChunk);
      if constexpr (sizeof(T) == 2) {
        for (int k = 0; k < width; k += 16) multiply_16(a + k, b + k);
      } else {
        for (int k = 0; k < width; k += 4) multiply_4(a + k, b + k);
      }
    }
    __syncthreads();
  }

 private:
  template <class Left, class Right>
  __device__ static void stage(Memory& memory, const GatheredRows<Left>& left,
                               const GatheredRows<Right>& right, int step, int dim) {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T)), kVectors = 8;  // of a row
    for (int i = threadIdx.x; i < (kHeads + kPairSlots) * kVectors; i += kPairThreads) {
      const int r = i / kVectors, at = i % kVectors * kVector, channel = step * kChunk + at;
      if (r < kHeads) {
        copy_vector(memory.heads[step % 2] + r * kStride + at, left[r], channel, dim, left.vectors);
      } else {
        copy_vector(memory.slots[step % 2] + (r - kHeads) * kStride + at, right[r - kHeads],
                    channel, dim, right.vectors);
      }
    }
    copies_commit();
  }

  __device__ void multiply_16(const T* a, const T* b) {
    std::uint32_t left[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) load_a(left[m], a + 16 * m * kStride, kStride);
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      std::uint32_t right[4];
      load_b(right, b + 8 * n * kStride, kStride);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply_add<T>(c[m][n], left[m], right[0], right[1]);
        multiply_add<T>(c[m][n + 1], left[m], right[2], right[3]);
      }
    }
  }

  __device__ void multiply_4(const T* a, const T* b) {
    const int lane = threadIdx.x % 32;
    auto four = [](const T* p) { return *reinterpret_cast<const float4*>(p); };
    float4 left[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      left[m][0] = four(a + (16 * m + lane / 4) * kStride);
      left[m][1] = four(a + (16 * m + lane / 4 + 8) * kStride);
    }
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 right = four(b + (8 * n + lane % 4 * 2 + j) * kStride);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& sum = c[m][n][2 * half + j];
            sum = fmaf(left[m][half].x, right.x, sum);
            sum = fmaf(left[m][half].y, right.y, sum);
            sum = fmaf(left[m][half].z, right.z, sum);
            sum = fmaf(left[m][half].w, right.w, sum);
          }
        }
      }
    }
  }
};

}  // namespace winnow::cuda
