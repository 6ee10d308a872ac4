// sparse_attention on the tensor cores of sm_80 and later, for bf16 and f16.
//
// A block takes one row, up to kHeads heads of one key head (64, 32 or 16; what is missing is
// zeros) and up to kChannels channels of the value (512 or 128), and walks the row's slots in tiles
// of 32:
//
//   gather      each warp copies its rows of the next tile by cp.async, 16 bytes per lane, while
//               this tile is computed; slots that do not count become zeros and a mark
//   S = Q K^T   each warp 32 or 16 heads x 16 keys x every other 16 channels, f32 into shared
//               memory
//   softmax     4 lanes per head, f32: P rounded to the inputs' dtype into shared memory, and a
//               factor
//   O += P V    each warp all heads x every (warps)-th 16 channels; O stays in registers
//
// Shared memory: Q, two tiles of keys (and of values, where they are not the first channels of the
// keys), two halves of S, P; 173 KB for 64 heads of 576, 125 KB for 32, 100 KB for 16: the number
// of heads in a block is the largest that the device holds and that leaves no processor idle.
//
// Order: a logit is two chains of mma.m16n8k16 over channels ascending, of the even and of the odd
// groups of 16, added up; sums over slots go tile by tile, and within a tile in a fixed tree
// (HeadSoftmax) or two mma. Nothing of it depends on kHeads,
// kChannels, the number of rows or where keys lie, so these leave no trace in the bits.
//
// Floor (H200, 4096 rows x 64 heads x 2048 slots, 576/512): 1168 GFLOP, 1.48 ms at 790 TFLOP/s; 9.7
// GB gathered, 1.1 ms out of L2.
// Measured in an earlier form (one chain, ids read and placed one step ahead): 9.9 ms, 8700 clocks
// per tile, and about as many with 16 heads: presumably latency, not ldmatrix, bounded it. This
// form has not been timed.

#include "cuda/sparse_attention.h"

#include "base/implementation.h"

namespace winnow::cuda {
namespace {

constexpr int kScoreStride = kTileKeys + 4, kWeightStride = kTileKeys + 8;

constexpr int warps_of(int heads) { return heads == 16 ? 4 : 8; }

// Where the parts of a block's shared memory begin, in bytes.
struct Layout {
  int key_stride, value_stride;  // of a row, in elements
  int keys, values, scores, weights, bytes;

  __host__ __device__ Layout(int heads, int dim_qk, int value_channels) {
    key_stride = padded(dim_qk);
    value_stride = value_channels == 0 ? 0 : padded(value_channels);
    keys = 2 * heads * key_stride;
    values = keys + 2 * 2 * kTileKeys * key_stride;
    scores = values + 2 * 2 * kTileKeys * value_stride;
    weights = scores + 2 * 4 * heads * kScoreStride;
    bytes = weights + 2 * heads * kWeightStride;
  }
};

template <class T, int kHeads, int kChannels>
__global__ void __launch_bounds__(32 * warps_of(kHeads)) attention_kernel(const Attention<T> a) {
  constexpr int kWarps = warps_of(kHeads);
  constexpr int kTiles = kHeads / 16;               // of heads
  constexpr int kHeadWarps = kWarps / 4;            // of S: beside 2 halves of the keys, 2 chains
  constexpr int kScoreTiles = kTiles / kHeadWarps;  // of heads, of a warp
  constexpr int kSteps = kChannels / 16 / kWarps;   // 16 channels each, of a warp
  constexpr int kWarpRows = kTileKeys / kWarps;     // rows of a tile that a warp gathers
  const int head_blocks = (a.group + kHeads - 1) / kHeads;
  const int channel_blocks = (a.dim_v + kChannels - 1) / kChannels;
  const std::int64_t block = block_index();
  const std::int64_t blocks_of_row =
      static_cast<std::int64_t>(a.kv_heads) * head_blocks * channel_blocks;
  const std::int64_t row = block / blocks_of_row;
  if (row >= a.rows) return;
  const int place = static_cast<int>(block % blocks_of_row);
  const int first_channel = place % channel_blocks * kChannels;
  const int g = place / channel_blocks / head_blocks;  // key head
  const int head_in_group = place / channel_blocks % head_blocks * kHeads;
  const int heads = min(kHeads, a.group - head_in_group), first_head = g * a.group + head_in_group;
  const int channels = min(kChannels, a.dim_v - first_channel);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool shared = a.shared_value;

  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float factors[kHeads];  // of what was summed before; at last 1 / sum
  __shared__ __align__(8) unsigned char counts[2][kTileKeys];  // whether a slot counts
  const Layout layout(kHeads, a.dim_qk, shared ? 0 : min(kChannels, a.dim_v));
  T* const query = reinterpret_cast<T*>(memory);
  T* const keys = reinterpret_cast<T*>(memory + layout.keys);
  T* const values = reinterpret_cast<T*>(memory + layout.values);
  float* const scores = reinterpret_cast<float*>(memory + layout.scores);
  T* const weights = reinterpret_cast<T*>(memory + layout.weights);
  const int width = layout.key_stride - 8;

  RowSlots slots = a.slots[row];
  slots.count = trimmed_count(slots);
  const int tiles = static_cast<int>((slots.count + kTileKeys - 1) / kTileKeys);

  // Lane l < kWarpRows looks after this warp's l-th slot of a tile, in three steps that each wait
  // for memory: its id, its place, its numbers.
  std::int64_t id = -1, key_at = -1, value_at = -1;
  auto read_id = [&](int tile) {
    const std::int64_t slot = static_cast<std::int64_t>(tile) * kTileKeys + warp * kWarpRows + lane;
    id = lane < kWarpRows && slot < slots.count ? slots.raw(slot) : -1;
  };
  auto locate = [&] {
    const bool counts = id >= 0 && slots.range.contains(id);
    key_at = counts ? a.key_places.offset(row, id) : -1;
    value_at = counts && !shared ? a.value_places.offset(row, id) : -1;
  };
  auto gather = [&](int tile) {
    const int stage = tile % 2, first = stage * kTileKeys + warp * kWarpRows;
    const T* from[kWarpRows];
    auto rows_at = [&](std::int64_t at, const T* data) {
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const std::int64_t offset = __shfl_sync(0xffffffffu, at, r);
        from[r] = offset < 0 ? nullptr : data + offset;
      }
    };
    if (lane < kWarpRows) counts[stage][warp * kWarpRows + lane] = key_at >= 0;
    rows_at(key_at, a.key + g * a.key_head);
    copy_rows(keys + first * layout.key_stride, layout.key_stride, from, a.key, a.dim_qk, width,
              a.key_vectors);
    if (!shared) {
      rows_at(value_at, a.value + g * a.value_head + first_channel);
      copy_rows(values + first * layout.value_stride, layout.value_stride, from, a.value, channels,
                layout.value_stride - 8, a.value_vectors);
    }
    copies_commit();
  };

  float sums[kTiles][kSteps][2][4] = {};
  HeadSoftmax softmax;  // of head threadIdx.x / 4
  if (tiles > 0) {
    read_id(0);
    for (int h = warp; h < kHeads; h += kWarps) {
      const T* const from[1] = {
          h < heads ? a.query + row * a.query_row + (first_head + h) * a.query_head : nullptr};
      copy_rows(query + h * layout.key_stride, 0, from, a.query, a.dim_qk, width, a.query_vectors);
    }
    locate();
    read_id(1);
    gather(0);
    locate();
    read_id(2);
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    copies_wait<0>();
    __syncthreads();  // this tile is here, and all are done with the one before
    if (tile + 1 < tiles) {
      gather(tile + 1);
      locate();
      read_id(tile + 3);
    }
    const T* tile_keys = keys + stage * kTileKeys * layout.key_stride;
    {
      const int first = warp / 4 * kScoreTiles * 16, first_key = warp % 4 / 2 * 16,
                chain = warp % 2;
      const T* left = query + first * layout.key_stride;
      const T* right = tile_keys + first_key * layout.key_stride;
      float s[kScoreTiles][2][4] = {};
#pragma unroll 4
      for (int c = 16 * chain; c < width; c += 32) {
        std::uint32_t q[kScoreTiles][4], k[4];
        load_b(k, right + c, layout.key_stride);
#pragma unroll
        for (int m = 0; m < kScoreTiles; ++m) {
          load_a(q[m], left + 16 * m * layout.key_stride + c, layout.key_stride);
        }
#pragma unroll
        for (int m = 0; m < kScoreTiles; ++m) {
          multiply_add<T>(s[m][0], q[m], k[0], k[1]);
          multiply_add<T>(s[m][1], q[m], k[2], k[3]);
        }
      }
      float* out =
          scores + (chain * kHeads + first + lane / 4) * kScoreStride + first_key + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < kScoreTiles; ++m, out += 16 * kScoreStride) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          *reinterpret_cast<float2*>(out + 8 * n) = {s[m][n][0], s[m][n][1]};
          *reinterpret_cast<float2*>(out + 8 * n + 8 * kScoreStride) = {s[m][n][2], s[m][n][3]};
        }
      }
    }
    __syncthreads();
    bool changed = false;
    if (threadIdx.x < 4 * kHeads) {
      const int h = threadIdx.x / 4, first = threadIdx.x % 4 * 8;
      const float *even = scores + h * kScoreStride + first, *odd = even + kHeads * kScoreStride;
      float z[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        z[j] = counts[stage][first + j] != 0 ? a.scale * (even[j] + odd[j]) : -INFINITY;
      }
      const float factor = softmax.step(z);
      changed = factor != 1;
      if (threadIdx.x % 4 == 0) factors[h] = factor;
      const uint4 packed = {pack<T>(z[0], z[1]), pack<T>(z[2], z[3]), pack<T>(z[4], z[5]),
                            pack<T>(z[6], z[7])};
      *reinterpret_cast<uint4*>(weights + h * kWeightStride + first) = packed;
    }
    if (__syncthreads_or(changed)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const float low = factors[16 * m + lane / 4], high = factors[16 * m + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          sums[m][n / 2][n % 2][0] *= low;
          sums[m][n / 2][n % 2][1] *= low;
          sums[m][n / 2][n % 2][2] *= high;
          sums[m][n / 2][n % 2][3] *= high;
        }
      }
    }
    const T* tile_values =
        shared ? tile_keys + first_channel : values + stage * kTileKeys * layout.value_stride;
    const int stride = shared ? layout.key_stride : layout.value_stride;
#pragma unroll
    for (int k = 0; k < kTileKeys; k += 16) {
      std::uint32_t p[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        load_a(p[m], weights + 16 * m * kWeightStride + k, kWeightStride);
      }
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const int c = 16 * (n * kWarps + warp);
        if (c >= channels) break;
        std::uint32_t v[4];
        load_b_transposed(v, tile_values + k * stride + c, stride);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          multiply_add<T>(sums[m][n][0], p[m], v[0], v[1]);
          multiply_add<T>(sums[m][n][1], p[m], v[2], v[3]);
        }
      }
    }
  }

  __syncthreads();  // all are done with the factors
  if (threadIdx.x < 4 * kHeads && threadIdx.x % 4 == 0) {
    const int h = threadIdx.x / 4;
    factors[h] = softmax.sum == 0 ? 0 : softmax.inverse();
    if (h < heads && first_channel == 0) {
      a.lse[row * a.lse_row + (first_head + h) * a.lse_head] = softmax.lse();
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = 16 * m + 8 * half + lane / 4;
      if (h >= heads) continue;
      const float inverse = factors[h];
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) {
        const int c = 16 * (n / 2 * kWarps + warp) + 8 * (n % 2) + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // A head whose weights are all 0 has output 0, whatever its values hold.
          const float x = inverse == 0 ? 0 : inverse * sums[m][n / 2][n % 2][2 * half + j];
          if (c + j < channels) a.store(row, first_head + h, first_channel + c + j, x);
        }
      }
    }
  }
}

template <class T, int kHeads, int kChannels>
const Kernel kAttention{attention_kernel<T, kHeads, kChannels>, 227 * 1024};

// Heads and channels of a block.
struct Block {
  int heads, channels;

  template <class T>
  std::int64_t shared_bytes(const Attention<T>& a) const {
    const int value_channels = a.shared_value ? 0 : a.dim_v < channels ? a.dim_v : channels;
    return Layout(heads, a.dim_qk, value_channels).bytes;
  }
  template <class T>
  std::int64_t blocks(const Attention<T>& a) const {
    const std::int64_t of_heads = (a.group + heads - 1) / heads;
    const std::int64_t of_channels = (a.dim_v + channels - 1) / channels;
    return a.rows * a.kv_heads * of_heads * of_channels;
  }
};

// The largest block that fits and occupies all processors; heads 0: none fits.
template <class T>
Block choose_block(const Attention<T>& a) {
  const std::int64_t most = shared_limit() - 2048;  // what is static
  Block block{a.group > 32 ? 64 : a.group > 16 ? 32 : 16, a.dim_v > 128 ? 512 : 128};
  auto fits = [&] { return block.shared_bytes(a) <= most; };
  while (block.heads > 16 && (!fits() || block.blocks(a) < processors())) block.heads /= 2;
  if (!fits() || block.blocks(a) < processors()) block.channels = 128;
  if (!fits()) block.heads = 0;
  return block;
}

template <class T>
void run_tiles(const SparseAttentionArgs& args, cudaStream_t stream) {
  const Attention<T> a(args);
  const Block block = choose_block(a);
  auto launch = [&](const auto& kernel) {
    kernel.launch("sparse_attention",
                  {.grid = grid_of(block.blocks(a)),
                   .block = dim3(static_cast<unsigned>(32 * warps_of(block.heads))),
                   .shared_bytes = block.shared_bytes(a),
                   .stream = stream},
                  a);
  };
  switch (block.heads + block.channels) {
    case 64 + 512: return launch(kAttention<T, 64, 512>);
    case 32 + 512: return launch(kAttention<T, 32, 512>);
    case 16 + 512: return launch(kAttention<T, 16, 512>);
    case 64 + 128: return launch(kAttention<T, 64, 128>);
    case 32 + 128: return launch(kAttention<T, 32, 128>);
    case 16 + 128: return launch(kAttention<T, 16, 128>);
    default: return run_plain_attention(args, stream);
  }
}

Refusal refuse(const SparseAttentionArgs& a) {
  if (a.query.dtype == DType::kF64) return "f64 is left to CPUs";
  if (!has_unit_stride(a.query) || !has_unit_stride(a.key.data) || !has_unit_stride(a.value) ||
      !has_unit_stride(a.output)) {
    return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const SparseAttentionArgs&) { return 0; }

void run(const SparseAttentionArgs& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  switch (a.query.dtype) {
    case DType::kBF16: return run_tiles<BF16>(a, stream);
    case DType::kF16: return run_tiles<F16>(a, stream);
    default: return run_plain_attention(a, stream);
  }
}

}  // namespace

extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
const Implementation<SparseAttentionArgs> sparse_attention_implementation = {
    "cuda.portable", refuse, workspace_bytes, run};

}  // namespace winnow::cuda
