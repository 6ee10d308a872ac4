// index_scores_at_backward on GPUs, in chunks of rows whose scratch fits 1 GiB:
//
//   sort      the chunk's entries (row, slot) by key (key_order.h)
//   weigh     u = query . key of 64 (16) heads x 64 slots (pair_tile.h); gated[h, s] * weight[h] as
//             what is multiplied (bf16 with bf16), and the tile's share of d_index_weights
//   weights   d_index_weights: the shares of a head
//   query, slots, add   backward.h, with dz = gated * weight
//
// Order: u as in pair_tile.h; d_index_weights over the slots of a tile in a tree, then over tiles
// ascending. Nothing depends on the chunk, on other rows or on the order in which blocks run.
// Floor: 6 * heads * dim FLOPs per slot, 2.6 ms for 4096 rows of 2048 slots and 64 heads of 128
// (H200); slot rows in f32, 4.3 GB written and read, 2 ms.
#include "base/implementation.h"
#include "cuda/index_backward.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::cuda {
namespace {

constexpr char kName[] = "index_scores_at_backward";
using Args = IndexScoresAtBackwardArgs;

template <class T, int kHeads>
__global__ void __launch_bounds__(kPairThreads) weigh_kernel(const IndexWeights<T> w) {
  using N = Multiplied<T>;
  using Tile = PairTile<N, kHeads>;
  __shared__ typename Tile::Memory memory;
  __shared__ std::int64_t key_at[kPairSlots];  // -1: does not count
  __shared__ float d_scores[kPairSlots];
  __shared__ float parts[Tile::kWarpColumns][kHeads];
  const BackwardChunk<T>& b = w.b;
  const int slot_tiles = tiles_of(b.list_slots, kPairSlots), head_tiles = tiles_of(b.group, kHeads);
  std::int64_t at = block_index();
  const int first_head = static_cast<int>(at % head_tiles) * kHeads;
  at /= head_tiles;
  const std::int64_t slot_tile = at % slot_tiles, first_slot = slot_tile * kPairSlots;
  const std::int64_t local = at / slot_tiles, row = b.first + local;
  if (local >= b.rows || first_slot >= b.counts[local]) return;
  const int heads = min(kHeads, b.group - first_head);
  if (threadIdx.x < kPairSlots) {
    const RowSlots slots = b.slots[row];
    const std::int64_t slot = first_slot + threadIdx.x;
    const std::int64_t id = slot < b.counts[local] ? slots[slot] : -1;
    key_at[threadIdx.x] = id < 0 ? -1 : id * b.key.row;
    d_scores[threadIdx.x] =
        id < 0 ? 0 : w.d_scores[local * w.d_scores_row + slot * w.d_scores_slot];
  }
  __syncthreads();
  Tile u;
  u.add(memory,
        GatheredRows<T>{b.query(row, first_head), b.query.head, nullptr, heads, b.query.vectors},
        GatheredRows<T>{b.key(0, 0), 0, key_at, kPairSlots, b.key.vectors}, b.query.channels);
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = Tile::head(m, 2 * half);
      const bool exists = h < heads;
      const float weight = exists ? w.weight(row, first_head + h) : 0;
      N* out = w.gated + (exists ? b.weights_at(local, first_head + h) + first_slot : 0);
      float share = 0;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int e = 2 * half + j, slot = Tile::slot(n, e);
          const bool counts = key_at[slot] >= 0;
          const float dot = u.c[m][n][e], d = d_scores[slot];
          const float gated = w.relu && !(dot > 0) ? 0 : d;  // closed for NaN
          const float active = w.relu && dot < 0 ? 0 : dot;  // NaN stays
          if (counts) share = fmaf(d, active, share);
          if (exists) out[slot] = from_float<N>(counts ? gated * weight : 0);
        }
      }
      share += __shfl_xor_sync(0xffffffffu, share, 1);
      share += __shfl_xor_sync(0xffffffffu, share, 2);
      if (threadIdx.x % 4 == 0) parts[Tile::warp_column()][h] = share;
    }
  }
  __syncthreads();
  if (threadIdx.x < heads) {
    float share = 0;
#pragma unroll
    for (int c = 0; c < Tile::kWarpColumns; ++c) share += parts[c][threadIdx.x];
    w.shares[(local * b.group + first_head + threadIdx.x) * slot_tiles + slot_tile] = share;
  }
}

// A thread for each row and head.
template <class T>
__global__ void __launch_bounds__(128) weights_kernel(const IndexWeights<T> w) {
  const BackwardChunk<T>& b = w.b;
  const std::int64_t pair = block_index() * 128 + threadIdx.x, local = pair / b.group;
  if (local >= b.rows) return;
  const float* shares = w.shares + pair * tiles_of(b.list_slots, kPairSlots);
  float& out = w.d_weights[(b.first + local) * w.d_weights_row + pair % b.group * w.d_weights_head];
  float sum = b.adds ? out : 0;
  for (int t = 0; t < tiles_of(b.counts[local], kPairSlots); ++t) sum += shares[t];
  out = sum;
}

template <class T, int kHeads>
const Kernel kWeigh{weigh_kernel<T, kHeads>};
template <class T>
const Kernel kWeights{weights_kernel<T>};

constexpr std::int64_t kBudget = std::int64_t{1} << 30;  // bytes of a chunk's scratch

std::int64_t rows_of_chunk(const Args& a) {
  const std::int64_t fit = kBudget / index_scratch_bytes(a.index_query, a.topk_indices.shape[1]);
  const std::int64_t all = a.index_query.shape[0];
  return all < fit ? all : fit > 1 ? fit : all > 1 ? 1 : all;
}

Refusal refuse(const Args& a) {
  if (a.index_query.dtype == DType::kF64) return "f64 is left to CPUs";
  for (const Tensor* t : {&a.index_query, &a.index_key, &a.d_index_query, &a.d_index_key}) {
    if (!has_unit_stride(*t)) return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const Args& a) {
  Carve carve(nullptr);
  with_element(a.index_query.dtype, [&]<class T>(T) {
    IndexScratch<T>(carve, a.index_query, rows_of_chunk(a), a.topk_indices.shape[1],
                    a.index_key.shape[0]);
  });
  return carve.bytes_to_ask();
}

void run(const Args& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const std::int64_t most = rows_of_chunk(a), rows = a.index_query.shape[0];
  with_element(a.index_query.dtype, [&]<class T>(T) {
    Carve carve(workspace.data);
    IndexScratch<T> scratch(carve, a.index_query, most, a.topk_indices.shape[1],
                            a.index_key.shape[0]);
    IndexWeights<T> w(a, scratch);
    w.b.slots = SlotLists(a.topk_indices, {}, a.starts, a.ends, a.index_key.shape[0]);
    w.d_scores_row = a.d_scores.strides[0];
    w.d_scores_slot = a.d_scores.strides[1];
    KeyOrder::clear(kName, a.index_key.shape[0], w.sums, stream);
    for (w.b.first = 0; w.b.first < rows; w.b.first += most) {
      w.b.rows = rows - w.b.first < most ? rows - w.b.first : most;
      w.d_scores = a.d_scores.as<float>() + w.b.first * w.d_scores_row;
      run_index_backward(kName, w, scratch.order, stream);
    }
  });
}

}  // namespace

template <class T>
void run_index_backward(const char* operation, const IndexWeights<T>& w, KeyOrder& order,
                        cudaStream_t stream) {
  const BackwardChunk<T>& b = w.b;
  order.sort(operation, b.slots, b.first, b.rows, stream);
  with_pair_heads(b.group, [&](auto heads) {
    kWeigh<T, heads.value>.launch(operation,
                                  {.grid = grid_of(b.rows * tiles_of(b.list_slots, kPairSlots) *
                                                   tiles_of(b.group, heads.value)),
                                   .block = dim3(kPairThreads),
                                   .stream = stream},
                                  w);
  });
  kWeights<T>.launch(
      operation,
      {.grid = grid_of((b.rows * b.group + 127) / 128), .block = dim3(128), .stream = stream}, w);
  run_backward_chunk(operation, b, stream);
  order.add(operation, b.slot_rows, w.sums, stream);
}
template void run_index_backward(const char*, const IndexWeights<float>&, KeyOrder&, cudaStream_t);
template void run_index_backward(const char*, const IndexWeights<BF16>&, KeyOrder&, cudaStream_t);
template void run_index_backward(const char*, const IndexWeights<F16>&, KeyOrder&, cudaStream_t);

extern const Implementation<Args> index_scores_at_backward_implementation;
const Implementation<Args> index_scores_at_backward_implementation = {"cuda.portable", refuse,
                                                                      workspace_bytes, run};

}  // namespace winnow::cuda
