// What the kernels of sparse_attention_backward on compute capability 9.0 share: a chunk of rows of a
// call, and the gathered tile of 64 keys. A row's heads are taken in blocks of 64, each an item of
// its own; heads that do not exist are zeros.
#pragma once

#include "cuda/attention.h"
#include "cuda/sm90/tma.h"
#include "cuda/sm90/wgmma_attention.h"

namespace winnow::cuda::sm90 {

inline constexpr int kBlockHeads = 64, kTileSlots = 64, kValueChannels = 512;

struct BackwardItems {
  const BF16 *query, *key;
  const void* d_output;  // bf16, or f32 if `wide`
  bool wide, vectors;    // vectors: rows of all three begin at multiples of 16 bytes
  std::int64_t query_row, query_head, key_row, output_row, output_head;
  const float* lse;
  std::int64_t lse_row, lse_head;
  SlotLists slots;
  const std::int32_t* counts;  // of KeyOrder, from the chunk's first row on
  float scale;
  int heads, blocks;         // of a row; ceil(heads / 64)
  std::int64_t first, rows;  // the chunk
  std::int64_t padded;       // slots of a list, rounded up to 64

  // Written by weigh, per item: delta of its 64 heads, the power of two of its partial rows, and p
  // and dp of its tiles (weights_at). What does not count has p = -0 and dp = 0.
  float *delta, *power, *p, *dp;
  // Written by multiply.
  float* d_query;
  std::int64_t d_query_row, d_query_head;
  bool d_query_pairs;      // rows begin at multiples of 8 bytes
  std::uint16_t* partial;  // f16 [item][padded][dim_qk] in the order of `stored_channel`

  __host__ __device__ std::int64_t items() const { return rows * blocks; }
  // Sums 4 q to 4 q + 3 of a thread of a warpgroup that multiplies 64 heads by 64 slots.
  __device__ std::int64_t weights_at(std::int64_t item, int tile, int q, int thread) const {
    return (item * padded + tile * kTileSlots) * kBlockHeads + (q * 128 + thread) * 4;
  }
};

void weigh(const char* operation, int dim_qk, const BackwardItems& items, cudaStream_t stream);
void multiply(const char* operation, int dim_qk, const BackwardItems& items, cudaStream_t stream);

// Partial rows lie in the order in which lanes hold the sums of a product, so that a lane writes 16
// bytes: the channel at a place.
__device__ inline int stored_channel(int place) {
  return place / 32 * 32 + place % 8 / 2 * 8 + place % 32 / 8 * 2 + place % 2;
}

// ---- names of barriers between warpgroups ---------------------------------------------------------
template <int kThreads>
__device__ void meet(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ void announce(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---- an item --------------------------------------------------------------------------------------
struct Item {
  std::int64_t row;       // of the call
  int count, tiles;       // slots up to the last that counts
  int first_head, heads;  // of the 64 that exist

  __device__ Item(const BackwardItems& b, std::int64_t index) {
    const std::int64_t local = index / b.blocks;
    row = b.first + local;
    count = b.counts[local];
    tiles = (count + kTileSlots - 1) / kTileSlots;
    first_head = static_cast<int>(index % b.blocks) * kBlockHeads;
    heads = min(kBlockHeads, b.heads - first_head);
  }
};

// Eight channels, 16 bytes, from `from` on.
__device__ inline uint4 load_eight(const BF16* from, bool vectors) {
  if (vectors) return __ldcs(reinterpret_cast<const uint4*>(from));
  std::uint32_t w[4];
  for (int i = 0; i < 4; ++i) {
    w[i] = from[2 * i].bits | static_cast<std::uint32_t>(from[2 * i + 1].bits) << 16;
  }
  return {w[0], w[1], w[2], w[3]};
}
__device__ inline uint4 load_eight(const float* from, bool) {
  return {pack<BF16>(from[0], from[1]), pack<BF16>(from[2], from[3]), pack<BF16>(from[4], from[5]),
          pack<BF16>(from[6], from[7])};
}

// ---- gathering ------------------------------------------------------------------------------------
// Warp w of a warpgroup gathers slots [16 w, 16 w + 16) of a tile, eight lanes a slot, four slots at a
// time: their places, and which of the 16 count. What does not count is zeros and is never read.
struct TilePlaces {
  const BF16* from[4];
  int bytes[4];
  std::uint32_t counting;  // of the warp's 16 slots

  // Channels from `channel` on.
  __device__ TilePlaces(const BackwardItems& b, const RowSlots& slots, int count, int tile,
                        int channel = 0) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    counting = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = tile * kTileSlots + 16 * warp + 4 * i + lane / 8;
      const std::int64_t id = slot < count ? slots[slot] : -1;
      from[i] = b.key + (id < 0 ? 0 : id * b.key_row) + channel + lane % 8 * 8;
      bytes[i] = id < 0 ? 0 : 16;
      const std::uint32_t lanes = __ballot_sync(0xffffffffu, id >= 0);
      counting |= ((lanes & 1) | (lanes >> 7 & 2) | (lanes >> 14 & 4) | (lanes >> 21 & 8)) << 4 * i;
    }
  }
  // To slabs at `to`; the copies are under way then. `mask`, or null, gets what counts.
  template <int kSlabs>
  __device__ void copy(unsigned char* to, std::uint16_t* mask, bool vectors) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (mask != nullptr && lane == 0) mask[warp] = static_cast<std::uint16_t>(counting);
    if (!vectors) return copy_slowly<kSlabs>(to);
    // Rows 4 apart: the swizzle of row r + 4 is that of r with bit 2 turned.
    const std::uint32_t at = shared_address(to);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy_async(at + s * kSlabBytes + swizzled(16 * warp + 4 * i + lane / 8, lane % 8),
                   from[i] + s * 64, bytes[i]);
      }
    }
  }

 private:
  template <int kSlabs>
  __device__ void copy_slowly(unsigned char* to) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 eight = bytes[i] == 0 ? uint4{} : load_eight(from[i] + s * 64, false);
        *reinterpret_cast<uint4*>(to + s * kSlabBytes +
                                  swizzled(16 * warp + 4 * i + lane / 8, lane % 8)) = eight;
      }
    }
  }
};

}  // namespace winnow::cuda::sm90
