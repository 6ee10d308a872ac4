// Query gradients and slot rows of backward.h: matrix products whose weights are ready.
//
//   query   a block takes one row, 64 (16) heads and 128 channels, and goes over the row's slots
//   slots   a block takes 64 slots of one row and 128 channels, and goes over the heads of a key
//           head
//
// Order: one chain over slots, or heads, ascending; the part of p after the part of dz.
// Floor: 2 FLOPs per weight and channel at the rate of mma (FMA outside bf16), and 4 bytes written
// per channel of a slot row: at 4096 rows x 2048 slots x 576 channels 19 GB, 4.6 ms on an H200,
// which should bound the second. Not timed.
#include "cuda/backward.h"

namespace winnow::cuda {
namespace {

template <class T, int kHeads>
__global__ void __launch_bounds__(kOuterThreads) query_kernel(const BackwardChunk<T> b) {
  using N = Multiplied<T>;
  using Tile = OuterTile<N, kHeads, true>;
  __shared__ typename Tile::Memory memory;
  const int channel_tiles = tiles_of(b.query.channels, kOuterChannels);
  const int head_tiles = tiles_of(b.group, kHeads);
  std::int64_t at = block_index();
  const int first_channel = static_cast<int>(at % channel_tiles) * kOuterChannels;
  at /= channel_tiles;
  const int in_group = static_cast<int>(at % head_tiles) * kHeads;
  at /= head_tiles;
  const int g = static_cast<int>(at % b.kv_heads);
  const std::int64_t local = at / b.kv_heads, row = b.first + local;
  if (local >= b.rows) return;
  const int heads = min(kHeads, b.group - in_group), first_head = g * b.group + in_group;
  const RowSlots slots = b.slots[row];
  const std::int64_t count = b.counts[local];

  Tile tile;
  tile.add(
      memory, count, static_cast<int>(round_up(count, kPairSlots)),
      [&](std::int64_t h) {
        return h < heads ? b.dz + b.weights_at(local, first_head + h) : nullptr;
      },
      [&](N* to, std::int64_t slot, int c) {
        const std::int64_t id = slot < count ? slots[slot] : -1;
        copy_vector(to, id < 0 ? nullptr : b.key(id, g), first_channel + c, b.key.channels,
                    b.key.vectors);
      });
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int h = Tile::row(m, e);
      if (h >= heads) continue;
      float* out = b.d_query + row * b.d_query_row + (first_head + h) * b.d_query_head;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
        const int c = first_channel + Tile::channel(n, e);
        if (c < b.query.channels) out[c] = b.adds ? out[c] + tile.d[m][n][e] : tile.d[m][n][e];
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kOuterThreads) slot_kernel(const BackwardChunk<T> b) {
  using N = Multiplied<T>;
  using Tile = OuterTile<N, kPairSlots, false>;
  __shared__ typename Tile::Memory memory;
  const int key_tiles = tiles_of(b.query.channels, kOuterChannels);
  const int channel_tiles = key_tiles + (b.shared ? 0 : tiles_of(b.value_channels, kOuterChannels));
  const int slot_tiles = tiles_of(b.list_slots, kPairSlots);
  std::int64_t at = block_index();
  const int channel_tile = static_cast<int>(at % channel_tiles);
  at /= channel_tiles;
  const int g = static_cast<int>(at % b.kv_heads);
  at /= b.kv_heads;
  const std::int64_t first_slot = at % slot_tiles * kPairSlots;
  const std::int64_t local = at / slot_tiles, row = b.first + local;
  if (local >= b.rows || first_slot >= b.counts[local]) return;
  const int first_head = g * b.group;
  const bool of_value = channel_tile >= key_tiles;  // a part of its own
  const int first_channel = (of_value ? channel_tile - key_tiles : channel_tile) * kOuterChannels;

  Tile tile;
  auto add = [&](const N* weights, const auto& rows) {
    tile.add(
        memory, b.group, kPairSlots,
        [&](std::int64_t h) { return weights + b.weights_at(local, first_head + h) + first_slot; },
        [&](N* to, std::int64_t h, int c) {
          copy_vector(to, h < b.group ? rows(row, first_head + h) : nullptr, first_channel + c,
                      rows.channels, rows.vectors);
        });
  };
  if (!of_value) add(b.dz, b.query);
  if (of_value || (b.shared && first_channel < b.value_channels)) {
    if (b.wide) {
      add(b.p, b.wide_d_output);
    } else {
      add(b.p, b.d_output);
    }
  }
  const int channels = of_value ? b.value_channels : b.query.channels;
  const std::int64_t width = std::int64_t{b.kv_heads} * b.width();
  float* rows = b.slot_rows + g * b.width() + (of_value ? b.query.channels : 0);
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::int64_t slot = first_slot + Tile::row(m, e);
      if (slot >= b.list_slots) continue;
      float* out = rows + (local * b.list_slots + slot) * width;
#pragma unroll
      for (int n = 0; n < Tile::kNTiles; ++n) {
        const int c = first_channel + Tile::channel(n, e);
        if (c < channels) out[c] = tile.d[m][n][e];
      }
    }
  }
}

template <class T, int kHeads>
const Kernel kQuery{query_kernel<T, kHeads>};
template <class T>
const Kernel kSlots{slot_kernel<T>};

}  // namespace

template <class T>
void run_backward_chunk(const char* operation, const BackwardChunk<T>& b, cudaStream_t stream) {
  const Launch launch{.block = dim3(kOuterThreads), .stream = stream};
  with_pair_heads(b.group, [&](auto heads) {
    Launch of_query = launch;
    of_query.grid = grid_of(b.rows * b.kv_heads * tiles_of(b.group, heads.value) *
                            tiles_of(b.query.channels, kOuterChannels));
    kQuery<T, heads.value>.launch(operation, of_query, b);
  });
  Launch of_slots = launch;
  const int value_tiles = b.shared ? 0 : tiles_of(b.value_channels, kOuterChannels);
  of_slots.grid = grid_of(b.rows * b.kv_heads * tiles_of(b.list_slots, kPairSlots) *
                          (tiles_of(b.query.channels, kOuterChannels) + value_tiles));
  kSlots<T>.launch(operation, of_slots, b);
}

template void run_backward_chunk(const char*, const BackwardChunk<float>&, cudaStream_t);
template void run_backward_chunk(const char*, const BackwardChunk<BF16>&, cudaStream_t);
template void run_backward_chunk(const char*, const BackwardChunk<F16>&, cudaStream_t);

}  // namespace winnow::cuda
