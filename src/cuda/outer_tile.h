// Sums over a long axis of products of weights with gathered rows: d[r, c] += sum_k w[r, k] * x[k,
// c], a tile of 64 or 16 rows x 128 channels in f32 registers of 4 warps. The second half of the
// backward operations: over slots it gives the gradient of a query, over heads the gradients that a
// slot brings its key.
//
// Both operands stream through shared memory in two stages of kStep along k. BF16 is multiplied on
// tensor cores, everything else as f32 by FMAs; one chain over k ascending in either case. The tile
// lies in fragments of mma as in pair_tile.h.
#pragma once

#include "cuda/pair_tile.h"

namespace winnow::cuda {

inline constexpr int kOuterChannels = 128;
inline constexpr int kOuterThreads = 128;

// kWeightsByRow: w lies as [r][k], else as [k][r].
template <class N, int kRows, bool kWeightsByRow>
struct OuterTile {
  static constexpr int kStep = 64 / static_cast<int>(sizeof(N));
  static constexpr int kVector = 16 / static_cast<int>(sizeof(N));
  static constexpr int kWarpRows = kRows == 64 ? 2 : 1, kWarpColumns = 4 / kWarpRows;
  static constexpr int kMTiles = kRows / 16 / kWarpRows, kNTiles = 16 / kWarpColumns;
  static constexpr int kWeightRows = kWeightsByRow ? kRows : kStep;
  static constexpr int kWeightColumns = kWeightsByRow ? kStep : kRows;
  static constexpr int kWeightStride = kWeightColumns + kVector;
  static constexpr int kStride = kOuterChannels + kVector;

  struct Memory {
    alignas(16) N weights[2][kWeightRows * kWeightStride];
    alignas(16) N rows[2][kStep * kStride];
  };

  float d[kMTiles][kNTiles][4] = {};

  __device__ static int warp_row() { return threadIdx.x / 32 / kWarpColumns; }
  __device__ static int warp_column() { return threadIdx.x / 32 % kWarpColumns; }
  __device__ static int row(int m, int e) {
    return 16 * (m + kMTiles * warp_row()) + threadIdx.x % 32 / 4 + e / 2 * 8;
  }
  __device__ static int channel(int n, int e) {
    return 8 * (n + kNTiles * warp_column()) + threadIdx.x % 4 * 2 + e % 2;
  }

  // Over k in [0, depth). weights(k or r) is where [k][..] or [r][..] begins, null where it does
  // not exist, with `weight_columns` numbers from there on; copy(to, k, c) brings 16 bytes of x[k,
  // c ..]. All threads call it; ends with a barrier.
  template <class Weights, class Copy>
  __device__ void add(Memory& memory, std::int64_t depth, int weight_columns, Weights&& weights,
                      Copy&& copy) {
    auto stage = [&](std::int64_t k0, int s) {
      constexpr int kVectors = kWeightColumns / kVector;
      for (int i = threadIdx.x; i < kWeightRows * kVectors; i += kOuterThreads) {
        const int r = i / kVectors, at = i % kVectors * kVector;
        const bool exists = kWeightsByRow || k0 + r < depth;
        const N* from = exists ? weights(kWeightsByRow ? r : k0 + r) : nullptr;
        const std::int64_t column = kWeightsByRow ? k0 + at : at;
        const int left = static_cast<int>(min(weight_columns - column, std::int64_t{kVector}));
        copy_vector(memory.weights[s] + r * kWeightStride + at,
                    from == nullptr || left <= 0 ? nullptr : from + column, 0, left, true);
      }
      for (int i = threadIdx.x; i < kStep * (kOuterChannels / kVector); i += kOuterThreads) {
        const int k = i / (kOuterChannels / kVector), c = i % (kOuterChannels / kVector) * kVector;
        copy(memory.rows[s] + k * kStride + c, k0 + k, c);
      }
      copies_commit();
    };
    if (depth > 0) stage(0, 0);
    int s = 0;
    for (std::int64_t k0 = 0; k0 < depth; k0 += kStep, s ^= 1) {
      copies_wait<0>();
      __syncthreads();
      if (k0 + kStep < depth) stage(k0 + kStep, s ^ 1);
      if constexpr (sizeof(N) == 2) {
        multiply_16(memory.weights[s], memory.rows[s]);
      } else {
        multiply_floats(memory.weights[s], memory.rows[s]);
      }
    }
    __syncthreads();
  }

 private:
  __device__ void multiply_16(const N* weights, const N* rows) {
    const N* right = rows + 8 * kNTiles * warp_column();
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      std::uint32_t w[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const int first = 16 * (m + kMTiles * warp_row());
        if constexpr (kWeightsByRow) {
          load_a(w[m], weights + first * kWeightStride + k, kWeightStride);
        } else {
          load_a_transposed(w[m], weights + k * kWeightStride + first, kWeightStride);
        }
      }
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        std::uint32_t x[4];
        load_b_transposed(x, right + k * kStride + 8 * n, kStride);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply_add<N>(d[m][n], w[m], x[0], x[1]);
          multiply_add<N>(d[m][n + 1], w[m], x[2], x[3]);
        }
      }
    }
  }

  __device__ void multiply_floats(const N* weights, const N* rows) {
#pragma unroll 4
    for (int k = 0; k < kStep; ++k) {
      float w[kMTiles][2];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row(m, 2 * half);
          w[m][half] = weights[kWeightsByRow ? r * kWeightStride + k : k * kWeightStride + r];
        }
      }
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const auto x = *reinterpret_cast<const float2*>(rows + k * kStride + channel(n, 0));
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            d[m][n][2 * half] = fmaf(w[m][half], x.x, d[m][n][2 * half]);
            d[m][n][2 * half + 1] = fmaf(w[m][half], x.y, d[m][n][2 * half + 1]);
          }
        }
      }
    }
  }
};

}  // namespace winnow::cuda
