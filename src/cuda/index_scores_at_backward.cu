// index_scores_at_backward on GPUs, in chunks of rows whose scratch fits 1 GiB:
//
//   sort      the chunk's entries (row, slot) by key (key_order.h)
//   weigh     u = query . key of 64 (16) heads x 64 slots (pair_tile.h); gated[h, s] * weight[h] as what is
//             multiplied (bf16 with bf16), and the tile's share of d_index_weights
//   weights   d_index_weights: the shares of a head
//   query, slots, add   backward.h, with dz = gated * weight
//
// Order: u as in pair_tile.h; d_index_weights over the slots of a tile in a tree, then over tiles
// ascending. Nothing depends on the chunk, on other rows or on the order in which blocks run.
// Floor: 6 * heads * dim FLOPs per slot, 2.6 ms for 4096 rows of 2048 slots and 64 heads of 128 (H200); slot
// rows in f32, 4.3 GB written and read, 2 ms.
#include "base/implementation.h"
#include "cuda/backward.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::cuda {
namespace {

constexpr char kName[] = "index_scores_at_backward";
constexpr std::int64_t kBudget = std::int64_t{1} << 30;  // bytes of a chunk's scratch

using Args = IndexScoresAtBackwardArgs;

template <class T>
struct Weigh {
  BackwardChunk<T> b;
  bool relu;
  const float* weights;
  std::int64_t weight_row, weight_head;
  const float* d_scores;
  std::int64_t d_scores_row, d_scores_slot;
  Multiplied<T>* gated;  // times weight, as the weights of backward.h lie
  float* shares;         // [row][head][tiles of slots]
  float* d_weights;
  std::int64_t d_weights_row, d_weights_head;
};

template <class T, int kHeads>
__global__ void __launch_bounds__(kPairThreads) weigh_kernel(const Weigh<T> w) {
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
    d_scores[threadIdx.x] = id < 0 ? 0 : w.d_scores[row * w.d_scores_row + slot * w.d_scores_slot];
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
      const float weight =
          exists ? w.weights[row * w.weight_row + (first_head + h) * w.weight_head] : 0;
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
__global__ void __launch_bounds__(128) weights_kernel(const Weigh<T> w) {
  const BackwardChunk<T>& b = w.b;
  const std::int64_t pair = block_index() * 128 + threadIdx.x, local = pair / b.group;
  if (local >= b.rows) return;
  const float* shares = w.shares + pair * tiles_of(b.list_slots, kPairSlots);
  float sum = 0;
  for (int t = 0; t < tiles_of(b.counts[local], kPairSlots); ++t) sum += shares[t];
  w.d_weights[(b.first + local) * w.d_weights_row + pair % b.group * w.d_weights_head] = sum;
}

template <class T, int kHeads>
const Kernel kWeigh{weigh_kernel<T, kHeads>};
template <class T>
const Kernel kWeights{weights_kernel<T>};

// The scratch of a call. Rows of a chunk follow from the shapes alone.
template <class T>
struct Scratch {
  using N = Multiplied<T>;
  std::int64_t slots, padded, tiles, rows;
  Carve carve;
  KeyOrder order;
  N* gated;
  float *shares, *slot_rows;

  Scratch(const Args& a, void* memory)
      : slots(a.topk_indices.shape[1]),
        padded(round_up(slots, kPairSlots)),
        tiles(padded / kPairSlots),
        rows(rows_of(a)),
        carve(memory),
        order(carve, rows, slots, a.index_key.shape[0]) {
    const std::int64_t pairs = rows * a.index_query.shape[1];
    gated = carve.take<N>(pairs * padded);
    shares = carve.take<float>(pairs * tiles);
    slot_rows = carve.take<float>(rows * slots * a.index_query.shape[2]);
  }

 private:
  std::int64_t rows_of(const Args& a) const {
    const auto bytes = static_cast<std::int64_t>(sizeof(N));
    const std::int64_t of_weights = a.index_query.shape[1] * (padded * bytes + tiles * 4);
    const std::int64_t of_row =
        of_weights + slots * (KeyOrder::kEntryBytes + a.index_query.shape[2] * 4);
    const std::int64_t fit = kBudget / of_row, all = a.index_query.shape[0];
    return all < fit ? all : fit > 1 ? fit : all > 1 ? 1 : all;
  }
};

Refusal refuse(const Args& a) {
  if (a.index_query.dtype == DType::kF64) return "f64 is left to CPUs";
  for (const Tensor* t : {&a.index_query, &a.index_key, &a.d_index_query, &a.d_index_key}) {
    if (!has_unit_stride(*t)) return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const Args& a) {
  std::int64_t bytes = 0;
  with_element(a.index_query.dtype,
               [&]<class T>(T) { bytes = Scratch<T>(a, nullptr).carve.bytes_to_ask(); });
  return bytes;
}

template <class T>
void run_typed(const Args& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  Scratch<T> scratch(a, workspace.data);
  Weigh<T> w{};
  BackwardChunk<T>& b = w.b;
  b.slots = SlotLists(a.topk_indices, {}, a.starts, a.ends, a.index_key.shape[0]);
  b.counts = scratch.order.counts();
  b.list_slots = scratch.slots;
  b.padded_slots = scratch.padded;
  b.kv_heads = 1;
  b.group = static_cast<int>(a.index_query.shape[1]);
  b.query = HeadRows<T>(a.index_query);
  b.key = HeadRows<T>(a.index_key);
  b.dz = scratch.gated;
  b.shared = true;
  b.d_query = a.d_index_query.as<float>();
  b.d_query_row = a.d_index_query.strides[0];
  b.d_query_head = a.d_index_query.strides[1];
  b.slot_rows = scratch.slot_rows;
  w.relu = a.relu;
  w.weights = a.index_weights.as<float>();
  w.weight_row = a.index_weights.strides[0];
  w.weight_head = a.index_weights.strides[1];
  w.d_scores = a.d_scores.as<float>();
  w.d_scores_row = a.d_scores.strides[0];
  w.d_scores_slot = a.d_scores.strides[1];
  w.gated = scratch.gated;
  w.shares = scratch.shares;
  w.d_weights = a.d_index_weights.as<float>();
  w.d_weights_row = a.d_index_weights.strides[0];
  w.d_weights_head = a.d_index_weights.strides[1];
  KeyOrder::Sums sums{};
  sums.a = a.d_index_key.as<float>();
  sums.a_key = a.d_index_key.strides[0];
  sums.heads = 1;
  sums.channels = sums.split = b.width();
  KeyOrder::clear(kName, a.index_key.shape[0], sums, stream);
  for (b.first = 0; b.first < a.index_query.shape[0]; b.first += scratch.rows) {
    b.rows = a.index_query.shape[0] - b.first;
    if (b.rows > scratch.rows) b.rows = scratch.rows;
    scratch.order.sort(kName, b.slots, b.first, b.rows, stream);
    with_pair_heads(b.group, [&](auto heads) {
      kWeigh<T, heads.value>.launch(
          kName,
          {.grid = grid_of(b.rows * scratch.tiles * tiles_of(b.group, heads.value)),
           .block = dim3(kPairThreads),
           .stream = stream},
          w);
    });
    kWeights<T>.launch(
        kName,
        {.grid = grid_of((b.rows * b.group + 127) / 128), .block = dim3(128), .stream = stream}, w);
    run_backward_chunk(kName, b, stream);
    scratch.order.add(kName, b.slot_rows, sums, stream);
  }
}

void run(const Args& a, Workspace workspace) {
  with_element(a.index_query.dtype, [&]<class T>(T) { run_typed<T>(a, workspace); });
}

}  // namespace

extern const Implementation<Args> index_scores_at_backward_implementation;
const Implementation<Args> index_scores_at_backward_implementation = {"cuda.portable", refuse,
                                                                      workspace_bytes, run};

}  // namespace winnow::cuda
