// sparse_attention_backward on GPUs, in chunks of rows whose scratch fits 1 GiB:
//
//   sort      the chunk's entries (row, slot) by key (key_order.h)
//   weigh     p = exp(scale * query . key - lse) and dp = d_output . value of 64 (16) heads x 64
//             slots (pair_tile.h), in f32, and the tile's share of delta = sum p dp
//   dz        dz = scale * p * (dp - delta), and both rounded to what is multiplied (bf16 with
//             bf16)
//   query, slots, add   backward.h
//
// Order: p and dp as in pair_tile.h; delta over the slots of a tile in a tree, then over tiles
// ascending. Nothing depends on the chunk, on other rows or on the order in which blocks run.
// With bf16 inputs p, dz and a d_output in f32 are rounded to bf16 before they are multiplied; f16
// is multiplied as f32, since its range does not hold gradients.
// Floor (H200, 4096 rows x 64 heads x 2048 slots, 576/512): 2.95 TFLOP, 3.75 ms; slot rows in f32,
// 19 GB written and read, 9 ms: these, and 13 GB of p and dp, are expected to bound it. Not timed.
#include "base/implementation.h"
#include "cuda/backward.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::cuda {
namespace {

constexpr char kName[] = "sparse_attention_backward";
constexpr std::int64_t kBudget = std::int64_t{1} << 30;  // bytes of a chunk's scratch

using Args = SparseAttentionBackwardArgs;

template <class T>
struct Weigh {
  BackwardChunk<T> b;
  HeadRows<T> value;  // [keys, kv_heads, dim_v]
  float scale;
  const float* lse;
  std::int64_t lse_row, lse_head;
  float *p, *dp;  // as the weights lie
  float* delta;   // [row][head][tiles of slots]
  Multiplied<T>*weights_p, *weights_dz;
};

template <class T, int kHeads>
__global__ void __launch_bounds__(kPairThreads) weigh_kernel(const Weigh<T> w) {
  using Tile = PairTile<Multiplied<T>, kHeads>;
  __shared__ typename Tile::Memory memory;
  __shared__ std::int64_t key_at[kPairSlots], value_at[kPairSlots];  // -1: does not count
  __shared__ float parts[Tile::kWarpColumns][kHeads];                // of delta
  const BackwardChunk<T>& b = w.b;
  const int slot_tiles = tiles_of(b.list_slots, kPairSlots), head_tiles = tiles_of(b.group, kHeads);
  std::int64_t at = block_index();
  const int in_group = static_cast<int>(at % head_tiles) * kHeads;
  at /= head_tiles;
  const int g = static_cast<int>(at % b.kv_heads);
  at /= b.kv_heads;
  const std::int64_t slot_tile = at % slot_tiles, first_slot = slot_tile * kPairSlots;
  const std::int64_t local = at / slot_tiles, row = b.first + local;
  if (local >= b.rows || first_slot >= b.counts[local]) return;
  const int heads = min(kHeads, b.group - in_group), first_head = g * b.group + in_group;
  if (threadIdx.x < kPairSlots) {
    const RowSlots slots = b.slots[row];
    const std::int64_t slot = first_slot + threadIdx.x;
    const std::int64_t id = slot < b.counts[local] ? slots[slot] : -1;
    key_at[threadIdx.x] = id < 0 ? -1 : id * b.key.row;
    value_at[threadIdx.x] = id < 0 ? -1 : id * w.value.row;
  }
  __syncthreads();
  Tile z, dp;
  z.add(memory,
        GatheredRows<T>{b.query(row, first_head), b.query.head, nullptr, heads, b.query.vectors},
        GatheredRows<T>{b.key(0, g), 0, key_at, kPairSlots, b.key.vectors}, b.query.channels);
  const GatheredRows<T> values{w.value(0, g), 0, value_at, kPairSlots, w.value.vectors};
  auto add_dp = [&]<class D>(const HeadRows<D>& d_output) {
    dp.add(
        memory,
        GatheredRows<D>{d_output(row, first_head), d_output.head, nullptr, heads, d_output.vectors},
        values, w.value.channels);
  };
  if (b.wide) {
    add_dp(b.wide_d_output);
  } else {
    add_dp(b.d_output);
  }
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = Tile::head(m, 2 * half);
      const bool exists = h < heads;
      const float lse = exists ? w.lse[row * w.lse_row + (first_head + h) * w.lse_head] : -INFINITY;
      const std::int64_t out = exists ? b.weights_at(local, first_head + h) + first_slot : 0;
      float delta = 0;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int e = 2 * half + j, slot = Tile::slot(n, e);
          // A head whose lse is -inf has p = dz = 0.
          const bool counts = key_at[slot] >= 0 && lse != -INFINITY;
          const float p = counts ? expf(w.scale * z.c[m][n][e] - lse) : 0;
          const float d = counts ? dp.c[m][n][e] : 0;
          delta = fmaf(p, d, delta);
          if (exists) {
            w.p[out + slot] = p;
            w.dp[out + slot] = d;
          }
        }
      }
      delta += __shfl_xor_sync(0xffffffffu, delta, 1);
      delta += __shfl_xor_sync(0xffffffffu, delta, 2);
      if (threadIdx.x % 4 == 0) parts[Tile::warp_column()][h] = delta;
    }
  }
  __syncthreads();
  if (threadIdx.x < heads) {
    float delta = 0;
#pragma unroll
    for (int c = 0; c < Tile::kWarpColumns; ++c) delta += parts[c][threadIdx.x];
    w.delta[(local * b.kv_heads * b.group + first_head + threadIdx.x) * slot_tiles + slot_tile] =
        delta;
  }
}

// A block for each row and head.
template <class T>
__global__ void __launch_bounds__(256) dz_kernel(const Weigh<T> w) {
  using N = Multiplied<T>;
  const BackwardChunk<T>& b = w.b;
  const std::int64_t pair = block_index(), heads = std::int64_t{b.kv_heads} * b.group;
  const std::int64_t local = pair / heads;
  if (local >= b.rows) return;
  const std::int64_t count = b.counts[local], end = round_up(count, kPairSlots);
  const float* parts = w.delta + pair * tiles_of(b.list_slots, kPairSlots);
  float delta = 0;
  for (std::int64_t t = 0; t < end / kPairSlots; ++t) delta += parts[t];
  const RowSlots slots = b.slots[b.first + local];
  const std::int64_t first = pair * b.padded_slots;
  for (std::int64_t s = threadIdx.x; s < end; s += blockDim.x) {
    const bool counts = s < count && slots[s] >= 0;
    const float p = w.p[first + s], dp = w.dp[first + s];
    w.weights_p[first + s] = from_float<N>(p);
    w.weights_dz[first + s] = from_float<N>(counts ? w.scale * (p * (dp - delta)) : 0);
  }
}

template <class T, int kHeads>
const Kernel kWeigh{weigh_kernel<T, kHeads>};
template <class T>
const Kernel kDz{dz_kernel<T>};

// The scratch of a call. Rows of a chunk follow from the shapes alone.
template <class T>
struct Scratch {
  static constexpr bool kRounds = sizeof(Multiplied<T>) != sizeof(float);
  std::int64_t slots, padded, tiles, width, rows;  // width: of a slot row
  Carve carve;
  KeyOrder order;
  float *p, *dp, *delta, *slot_rows;
  Multiplied<T>*weights_p, *weights_dz;

  Scratch(const Args& a, void* memory)
      : slots(a.topk_indices.empty() ? a.key.shape[0] : a.topk_indices.shape[1]),
        padded(round_up(slots, kPairSlots)),
        tiles(padded / kPairSlots),
        width(a.key.shape[1] * (a.key.shape[2] + (a.value.empty() ? 0 : a.value.shape[2]))),
        rows(rows_of(a)),
        carve(memory),
        order(carve, rows, slots, a.key.shape[0]) {
    const std::int64_t pairs = rows * a.query.shape[1];
    p = carve.take<float>(pairs * padded);
    dp = carve.take<float>(pairs * padded);
    delta = carve.take<float>(pairs * tiles);
    slot_rows = carve.take<float>(rows * slots * width);
    if constexpr (kRounds) {
      weights_p = carve.take<Multiplied<T>>(pairs * padded);
      weights_dz = carve.take<Multiplied<T>>(pairs * padded);
    } else {  // in place
      weights_p = p;
      weights_dz = dp;
    }
  }

 private:
  std::int64_t rows_of(const Args& a) const {
    const std::int64_t of_weights = a.query.shape[1] * (padded * (kRounds ? 12 : 8) + tiles * 4);
    const std::int64_t of_row = of_weights + slots * (KeyOrder::kEntryBytes + width * 4) + 1;
    const std::int64_t fit = kBudget / of_row;
    const std::int64_t all = a.query.shape[0];
    return all < fit ? all : fit > 1 ? fit : all > 1 ? 1 : all;
  }
};

Refusal refuse(const Args& a) {
  if (a.query.dtype == DType::kF64) return "f64 is left to CPUs";
  for (const Tensor* t :
       {&a.query, &a.key, &a.value, &a.d_output, &a.d_query, &a.d_key, &a.d_value}) {
    if (!has_unit_stride(*t)) return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const Args& a) {
  std::int64_t bytes = 0;
  with_element(a.query.dtype,
               [&]<class T>(T) { bytes = Scratch<T>(a, nullptr).carve.bytes_to_ask(); });
  return bytes;
}

template <class T>
void run_typed(const Args& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  Scratch<T> scratch(a, workspace.data);
  Weigh<T> w{};
  BackwardChunk<T>& b = w.b;
  b.slots = SlotLists(a.topk_indices, a.topk_lengths, a.starts, a.ends, a.key.shape[0]);
  b.counts = scratch.order.counts();
  b.list_slots = scratch.slots;
  b.padded_slots = scratch.padded;
  b.kv_heads = static_cast<int>(a.key.shape[1]);
  b.group = static_cast<int>(a.query.shape[1]) / b.kv_heads;
  b.query = HeadRows<T>(a.query);
  b.key = HeadRows<T>(a.key);
  b.dz = scratch.weights_dz;
  b.p = scratch.weights_p;
  b.wide = !std::is_same_v<T, float> && a.d_output.dtype == DType::kF32;
  if (b.wide) {
    b.wide_d_output = HeadRows<float>(a.d_output);
  } else {
    b.d_output = HeadRows<T>(a.d_output);
  }
  b.value_channels = static_cast<int>(a.d_output.shape[2]);
  b.shared = a.value.empty();
  b.d_query = a.d_query.as<float>();
  b.d_query_row = a.d_query.strides[0];
  b.d_query_head = a.d_query.strides[1];
  b.slot_rows = scratch.slot_rows;
  w.value = HeadRows<T>(b.shared ? a.key : a.value);
  w.value.channels = b.value_channels;
  w.scale = static_cast<float>(a.softmax_scale);
  w.lse = a.lse.as<float>();
  w.lse_row = a.lse.strides[0];
  w.lse_head = a.lse.strides[1];
  w.p = scratch.p;
  w.dp = scratch.dp;
  w.delta = scratch.delta;
  w.weights_p = scratch.weights_p;
  w.weights_dz = scratch.weights_dz;
  KeyOrder::Sums sums{};
  sums.a = a.d_key.as<float>();
  sums.a_key = a.d_key.strides[0];
  sums.a_head = a.d_key.strides[1];
  sums.heads = b.kv_heads;
  sums.channels = b.width();
  sums.split = b.query.channels;
  if (!b.shared) {
    sums.b = a.d_value.as<float>();
    sums.b_key = a.d_value.strides[0];
    sums.b_head = a.d_value.strides[1];
  }
  KeyOrder::clear(kName, a.key.shape[0], sums, stream);
  for (b.first = 0; b.first < a.query.shape[0]; b.first += scratch.rows) {
    b.rows = a.query.shape[0] - b.first;
    if (b.rows > scratch.rows) b.rows = scratch.rows;
    scratch.order.sort(kName, b.slots, b.first, b.rows, stream);
    with_pair_heads(b.group, [&](auto heads) {
      kWeigh<T, heads.value>.launch(
          kName,
          {.grid = grid_of(b.rows * scratch.tiles * b.kv_heads * tiles_of(b.group, heads.value)),
           .block = dim3(kPairThreads),
           .stream = stream},
          w);
    });
    kDz<T>.launch(
        kName, {.grid = grid_of(b.rows * a.query.shape[1]), .block = dim3(256), .stream = stream},
        w);
    run_backward_chunk(kName, b, stream);
    scratch.order.add(kName, b.slot_rows, sums, stream);
  }
}

void run(const Args& a, Workspace workspace) {
  with_element(a.query.dtype, [&]<class T>(T) { run_typed<T>(a, workspace); });
}

}  // namespace

extern const Implementation<Args> sparse_attention_backward_implementation;
const Implementation<Args> sparse_attention_backward_implementation = {"cuda.portable", refuse,
                                                                       workspace_bytes, run};

}  // namespace winnow::cuda
