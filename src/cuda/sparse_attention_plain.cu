// sparse_attention by multiply-adds in f32: for f32, and for shapes whose tiles do not fit the
// shared memory beside the tensor cores.
//
// A block takes one row, 8 heads of one key head and 512 channels of the value, 32 slots at a time:
//
//   logits      each warp 4 slots x 8 heads, a channel per lane; keys come from memory once,
//               queries out of shared memory, 1024 channels at a time
//   softmax     4 lanes per head (HeadSoftmax)
//   O += P V    each thread two channels x 8 heads in registers, values from memory
//
// Order: a logit is 32 chains of FMAs, lane l over channels l, l + 32, ..., added up in a tree; an
// output is a chain of FMAs over the slots that count.
// Floor: FMAs, 2 (dim_qk + dim_v) FLOPs per head and slot at 60 TFLOP/s (H200). Reading queries out
// of shared memory, one per 4 FMAs, bounds it to that rate; latency of the gathered keys to about a
// third.
#include "cuda/sparse_attention.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kHeads = 8;
constexpr int kWarpSlots = kTileKeys / kWarps;
constexpr int kStagedChannels = 1024;    // of the query
constexpr int kChannels = 2 * kThreads;  // of the value

// Lane l gets the sum over lanes of x[l].
__device__ float sum_across_lanes(float (&x)[32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int level = 0; level < 5; ++level) {
    const int half = 16 >> level;
    const bool upper = (lane & half) != 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i >= half) break;
      const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, half);
    }
  }
  return x[0];
}

template <class T>
__global__ void __launch_bounds__(kThreads) plain_kernel(const Attention<T> a) {
  __shared__ float query[kHeads][kStagedChannels];
  __shared__ float scores[kHeads][kTileKeys + 4];
  __shared__ __align__(16) float weights[kTileKeys][kHeads];
  __shared__ float factors[kHeads];
  __shared__ std::int64_t key_at[kTileKeys], value_at[kTileKeys];  // -1: does not count

  const int head_blocks = (a.group + kHeads - 1) / kHeads;
  const int channel_blocks = (a.dim_v + kChannels - 1) / kChannels;
  const std::int64_t blocks_of_row =
      static_cast<std::int64_t>(a.kv_heads) * head_blocks * channel_blocks;
  const std::int64_t row = block_index() / blocks_of_row;
  if (row >= a.rows) return;
  const int place = static_cast<int>(block_index() % blocks_of_row);
  const int first_channel = place % channel_blocks * kChannels;
  const int g = place / channel_blocks / head_blocks;
  const int head_in_group = place / channel_blocks % head_blocks * kHeads;
  const int heads = min(kHeads, a.group - head_in_group), first_head = g * a.group + head_in_group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* const all_keys = a.key + g * a.key_head;
  const T* const all_values = a.value + g * a.value_head;

  RowSlots slots = a.slots[row];
  slots.count = trimmed_count(slots);
  auto stage_query = [&](int first) {  // channels [first, first + kStagedChannels)
    for (int h = warp; h < kHeads; h += kWarps) {
      const T* from = a.query + row * a.query_row + (first_head + h) * a.query_head;
      for (int c = lane; c < min(kStagedChannels, a.dim_qk - first); c += 32) {
        query[h][c] = h < heads ? to_float(from[first + c]) : 0;
      }
    }
  };
  if (slots.count > 0 && a.dim_qk <= kStagedChannels) stage_query(0);

  float sums[kHeads][2] = {};
  HeadSoftmax softmax;  // of head lane / 4, in warp 0
  for (std::int64_t tile = 0; tile < slots.count; tile += kTileKeys) {
    __syncthreads();  // all are done with the tile before
    if (threadIdx.x < kTileKeys) {
      const std::int64_t slot = tile + threadIdx.x;
      const std::int64_t id = slot < slots.count ? slots[slot] : -1;
      key_at[threadIdx.x] = id < 0 ? -1 : a.key_places.offset(row, id);
      value_at[threadIdx.x] = id < 0 ? -1 : a.value_places.offset(row, id);
    }
    __syncthreads();
    const T* from[kWarpSlots];
#pragma unroll
    for (int s = 0; s < kWarpSlots; ++s) {
      const std::int64_t at = key_at[warp * kWarpSlots + s];
      from[s] = at < 0 ? nullptr : all_keys + at;
    }
    float dots[kWarpSlots * kHeads] = {};
    for (int first = 0; first < a.dim_qk; first += kStagedChannels) {
      if (a.dim_qk > kStagedChannels) {
        __syncthreads();
        stage_query(first);
        __syncthreads();
      }
      for (int c = lane; c < min(kStagedChannels, a.dim_qk - first); c += 32) {
        float k[kWarpSlots];
#pragma unroll
        for (int s = 0; s < kWarpSlots; ++s) {
          k[s] = from[s] == nullptr ? 0 : to_float(from[s][first + c]);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float q = query[h][c];
#pragma unroll
          for (int s = 0; s < kWarpSlots; ++s) {
            dots[s * kHeads + h] = fmaf(q, k[s], dots[s * kHeads + h]);
          }
        }
      }
    }
    static_assert(kWarpSlots * kHeads == 32);
    scores[lane % kHeads][warp * kWarpSlots + lane / kHeads] = sum_across_lanes(dots);
    __syncthreads();
    if (warp == 0) {
      const int h = lane / 4, first_slot = lane % 4 * 8;
      float z[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        z[j] = key_at[first_slot + j] < 0 ? -INFINITY : a.scale * scores[h][first_slot + j];
      }
      const float factor = softmax.step(z);
      if (lane % 4 == 0) factors[h] = factor;
#pragma unroll
      for (int j = 0; j < 8; ++j) weights[first_slot + j][h] = z[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sums[h][j] *= factors[h];
      const int c = first_channel + j * kThreads + threadIdx.x;
      if (c >= a.dim_v) break;
#pragma unroll 4
      for (int s = 0; s < kTileKeys; ++s) {
        if (value_at[s] < 0) continue;
        const float v = to_float(all_values[value_at[s] + c]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) sums[h][j] = fmaf(weights[s][h], v, sums[h][j]);
      }
    }
  }

  __syncthreads();
  if (warp == 0 && lane % 4 == 0) {
    const int h = lane / 4;
    factors[h] = softmax.sum == 0 ? 0 : softmax.inverse();
    if (h < heads && first_channel == 0) {
      a.lse[row * a.lse_row + (first_head + h) * a.lse_head] = softmax.lse();
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int c = first_channel + j * kThreads + threadIdx.x;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      // A head whose weights are all 0 has output 0, whatever its values hold.
      const float x = factors[h] == 0 ? 0 : factors[h] * sums[h][j];
      if (h < heads && c < a.dim_v) a.store(row, first_head + h, c, x);
    }
  }
}

template <class T>
const Kernel kPlain{plain_kernel<T>};

}  // namespace

void run_plain_attention(const SparseAttentionArgs& args, cudaStream_t stream) {
  with_element(args.query.dtype, [&]<class T>(T) {
    const Attention<T> a(args);
    const std::int64_t head_blocks = (a.group + kHeads - 1) / kHeads;
    const std::int64_t channel_blocks = (a.dim_v + kChannels - 1) / kChannels;
    kPlain<T>.launch("sparse_attention",
                     {.grid = grid_of(a.rows * a.kv_heads * head_blocks * channel_blocks),
                      .block = dim3(kThreads),
                      .stream = stream},
                     a);
  });
}

}  // namespace winnow::cuda
