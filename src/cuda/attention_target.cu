// attention_target on GPUs: a block takes 64 slots of one row and goes through all heads, 64 (or
// 16, where a key head has no more) at a time: their logits as a tile of pairs (pair_tile.h), the
// exponentials, and their sums over the heads of the tile.
//
// Order: a dot product as in pair_tile.h; over the heads of a tile the rows of a fragment, then a
// tree over the 8 lanes that share a slot, then the warps; tiles of heads ascending. Nothing of it
// depends on other slots or rows.
// Floor: 2 * heads * dim_qk FLOPs per slot at the rate of mma (FMA in f32), 0.8 ms for 4096 rows of
// 2048 slots and 64 heads of 576 (H200). Not profiled; expected bound, L2: a tile of 64 x 64 pairs
// streams queries and keys.
#include "base/implementation.h"
#include "cuda/attention_target.h"
#include "cuda/elements.h"
#include "cuda/pair_tile.h"
#include "winnow/attention_target.h"

namespace winnow::cuda {
namespace {

template <class T, int kHeads>
__global__ void __launch_bounds__(kPairThreads) target_kernel(const AttentionTarget<T> t) {
  using Tile = PairTile<T, kHeads>;
  __shared__ typename Tile::Memory memory;
  __shared__ std::int64_t places[kPairSlots];  // -1: does not count
  __shared__ float sums[Tile::kWarpRows][kPairSlots];
  const std::int64_t local = block_index() / t.tiles, row = t.first + local;
  const std::int64_t first = block_index() % t.tiles * kPairSlots;
  if (local >= t.rows) return;
  const RowSlots slots = t.slots[row];
  float total = 0;  // of slot threadIdx.x
  bool counts = false;
  if (threadIdx.x < kPairSlots) {
    const std::int64_t slot = first + threadIdx.x;
    const std::int64_t id = slot < slots.count ? slots[slot] : -1;
    counts = id >= 0;
    places[threadIdx.x] = counts ? id * t.key_row : -1;
  }
  const int tiles = __syncthreads_or(counts) ? (t.group + kHeads - 1) / kHeads * t.kv_heads : 0;
  const float* lse = t.lse + row * t.lse_row;
  for (int tile = 0; tile < tiles; ++tile) {
    const int head_tiles = tiles / t.kv_heads, g = tile / head_tiles;
    const int in_group = tile % head_tiles * kHeads, first_head = g * t.group + in_group;
    const int heads = min(kHeads, t.group - in_group);
    Tile pairs;
    pairs.add(memory,
              GatheredRows<T>{t.query + row * t.query_row + first_head * t.query_head, t.query_head,
                              nullptr, heads, t.query_vectors},
              GatheredRows<T>{t.key + g * t.key_head, 0, places, kPairSlots, t.key_vectors}, t.dim);
    float own[Tile::kNTiles][2] = {};
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int h = Tile::head(m, 2 * half);
        const float l = h < heads ? lse[(first_head + h) * t.lse_head] : -INFINITY;
        if (l == -INFINITY) continue;  // saw no key
#pragma unroll
        for (int n = 0; n < Tile::kNTiles; ++n) {
          own[n][0] += expf(t.scale * pairs.c[m][n][2 * half] - l);
          own[n][1] += expf(t.scale * pairs.c[m][n][2 * half + 1] - l);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          own[n][j] += __shfl_xor_sync(0xffffffffu, own[n][j], lanes);
        }
        if (threadIdx.x % 32 < 4) sums[Tile::warp_row()][Tile::slot(n, j)] = own[n][j];
      }
    }
    __syncthreads();
    if (threadIdx.x < kPairSlots) {
#pragma unroll
      for (int w = 0; w < Tile::kWarpRows; ++w) total += sums[w][threadIdx.x];
    }
  }
  if (threadIdx.x < kPairSlots && first + threadIdx.x < t.slots.topk) {
    t.target[local * t.target_row + (first + threadIdx.x) * t.target_slot] = counts ? total : 0;
  }
}

template <class T, int kHeads>
const Kernel kTarget{target_kernel<T, kHeads>};

Refusal refuse(const AttentionTargetArgs& a) {
  if (a.query.dtype == DType::kF64) return "f64 is left to CPUs";
  if (!has_unit_stride(a.query) || !has_unit_stride(a.key)) return "channels must have stride 1";
  return {};
}

std::int64_t workspace_bytes(const AttentionTargetArgs&) { return 0; }

void run(const AttentionTargetArgs& a, Workspace workspace) {
  with_element(a.query.dtype, [&]<class T>(T) {
    AttentionTarget<T> t(a.query, a.key, a.lse, a.softmax_scale);
    t.slots = SlotLists(a.topk_indices, {}, a.starts, a.ends, a.key.shape[0]);
    t.rows = a.query.shape[0];
    t.target = a.attention_target.as<float>();
    t.target_row = a.attention_target.strides[0];
    t.target_slot = a.attention_target.strides[1];
    run_attention_target("attention_target", t, stream_of(workspace));
  });
}

}  // namespace

template <class T>
void run_attention_target(const char* operation, AttentionTarget<T> t, cudaStream_t stream) {
  t.tiles = (t.slots.topk + kPairSlots - 1) / kPairSlots;
  with_pair_heads(t.group, [&](auto heads) {
    kTarget<T, heads.value>.launch(
        operation,
        {.grid = grid_of(t.rows * t.tiles), .block = dim3(kPairThreads), .stream = stream}, t);
  });
}
template void run_attention_target(const char*, AttentionTarget<float>, cudaStream_t);
template void run_attention_target(const char*, AttentionTarget<BF16>, cudaStream_t);
template void run_attention_target(const char*, AttentionTarget<F16>, cudaStream_t);

extern const Implementation<AttentionTargetArgs> attention_target_implementation;
const Implementation<AttentionTargetArgs> attention_target_implementation = {
    "cuda.portable", refuse, workspace_bytes, run};

}  // namespace winnow::cuda
