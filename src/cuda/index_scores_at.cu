// index_scores_at on GPUs: the scorer's arithmetic (scorer.cu, scorer_f32.cu) over keys that a list
// names.
//
//   16 bits   a warp takes 16 slots of a row as left operands, in registers, and goes through the
//             heads, 8 at a time, as right operands
//   f32       a block takes 32 slots of a row; their keys lie in shared memory, a lane has a slot
//
// Order: that of the scorer, so that a score has the bits that index_scores gives it. 16 bits: lane
//   c of a quad takes channels 8 c to 8 c + 7 of each 32; lane c sums heads 8 b + 2 c and 8 b + 2 c
//   + 1, each in one FMA chain over b ascending; then both, then lanes c and c ^ 1, then c ^ 2;
//   then parts of 64 heads (32 where channels exceed 128). f32: one FMA chain over channels; warp w
//   sums heads 32 n + 4 w + {0, 1, 2, 3} in one chain; then the warps ascending.
// Floor: 2 * heads * dim FLOPs per slot at the rate of mma (FMA in f32); 1.2 ms for 4096 rows of
//   2048 slots and 64 heads of 128 (H200). Not timed; expected bound, the queries, which every warp
//   reads out of the L1.
#include "base/implementation.h"
#include "cuda/index_scores_at.h"
#include "winnow/index_scores_at.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 4, kWarpSlots = 16;
constexpr int kFloatWarps = 8, kFloatSlots = 32, kFloatHeads = 4;  // heads of a warp at a time

// Channels [channel, channel + 8) of a row, zeros behind the last; all zeros of null.
template <class T>
__device__ uint4 load_eight(const T* row, int channel, int dim, bool vectors) {
  if (row == nullptr || channel >= dim) return {0, 0, 0, 0};
  if (vectors && channel + 8 <= dim) return *reinterpret_cast<const uint4*>(row + channel);
  std::uint32_t words[4] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (channel + j < dim) words[j / 2] |= std::uint32_t{row[channel + j].bits} << j % 2 * 16;
  }
  return {words[0], words[1], words[2], words[3]};
}

template <class T, int kPairs>  // kPairs: of steps along the channels, 32 each
__global__ void __launch_bounds__(32 * kWarps) scores_kernel(const ScoresAt s) {
  constexpr int kPartHeads = kPairs > 4 ? 32 : 64;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const std::int64_t local = block_index() / s.tiles, row = s.first + local;
  if (local >= s.rows) return;
  const std::int64_t first = (block_index() % s.tiles * kWarps + threadIdx.x / 32) * kWarpSlots;
  const RowSlots list = s.slots[row];
  const std::int64_t ids[2] = {s.id(list, first + g), s.id(list, first + g + 8)};
  float score = 0;  // of slot first + g + 8 c, in lanes c < 2
  if (__any_sync(0xffffffffu, ids[0] >= 0 || ids[1] >= 0)) {
    uint4 key[2][kPairs];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* from =
          ids[half] < 0 ? nullptr : static_cast<const T*>(s.key) + ids[half] * s.key_row;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        key[half][p] = load_eight(from, 32 * p + 8 * c, s.dim, s.vectors);
      }
    }
    const T* query = static_cast<const T*>(s.query) + row * s.query_row;
    for (int part = 0; part < s.heads; part += kPartHeads) {
      float sum[4] = {};
      for (int head = part; head < min(s.heads, part + kPartHeads); head += 8) {
        const T* from = head + g < s.heads ? query + (head + g) * s.query_head : nullptr;
        float d[4] = {};
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          const uint4 q = load_eight(from, 32 * p + 8 * c, s.dim, s.vectors);
          mma<T>(d, key[0][p].x, key[1][p].x, key[0][p].y, key[1][p].y, q.x, q.y);
          mma<T>(d, key[0][p].z, key[1][p].z, key[0][p].w, key[1][p].w, q.z, q.w);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int h = head + 2 * c + e;
          if (h >= s.heads) continue;  // what is no head may be NaN, of infinite keys
          const float weight = s.weight(row, h);
          sum[e] = fmaf(weight, max_nan(d[e], s.floor), sum[e]);
          sum[e + 2] = fmaf(weight, max_nan(d[e + 2], s.floor), sum[e + 2]);
        }
      }
      const float low = sum[0] + sum[1], high = sum[2] + sum[3];
      float x = (c & 1) != 0 ? high : low;
      x += __shfl_xor_sync(0xffffffffu, (c & 1) != 0 ? low : high, 1);
      x += __shfl_xor_sync(0xffffffffu, x, 2);
      score = part == 0 ? x : score + x;
    }
  }
  if (c < 2) s.store(local, first + g + 8 * c, (c == 0 ? ids[0] : ids[1]) < 0 ? -INFINITY : score);
}

__global__ void __launch_bounds__(32 * kFloatWarps) float_scores_kernel(const ScoresAt s) {
  extern __shared__ float keys[];  // [kFloatSlots][dim + 1]
  __shared__ float sums[kFloatWarps][kFloatSlots];
  __shared__ std::int64_t ids[kFloatSlots];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = s.dim + 1;
  const std::int64_t local = block_index() / s.tiles, row = s.first + local;
  if (local >= s.rows) return;
  const std::int64_t first = block_index() % s.tiles * kFloatSlots;
  if (warp == 0) ids[lane] = s.id(s.slots[row], first + lane);
  __syncthreads();
  for (int j = warp; j < kFloatSlots; j += kFloatWarps) {
    const float* key = static_cast<const float*>(s.key) + ids[j] * s.key_row;
    for (int d = lane; d < s.dim; d += 32) keys[j * pitch + d] = ids[j] < 0 ? 0 : key[d];
  }
  __syncthreads();
  const float* query = static_cast<const float*>(s.query) + row * s.query_row;
  float sum = 0;
  for (int h0 = kFloatHeads * warp; h0 < s.heads; h0 += kFloatHeads * kFloatWarps) {
    float dot[kFloatHeads] = {};
    const float* q[kFloatHeads];
#pragma unroll
    for (int i = 0; i < kFloatHeads; ++i) {
      q[i] = query + (h0 + i < s.heads ? h0 + i : h0) * s.query_head;
    }
#pragma unroll 4
    for (int d = 0; d < s.dim; ++d) {
      const float k = keys[lane * pitch + d];
#pragma unroll
      for (int i = 0; i < kFloatHeads; ++i) dot[i] = fmaf(q[i][d], k, dot[i]);
    }
#pragma unroll
    for (int i = 0; i < kFloatHeads; ++i) {
      if (h0 + i < s.heads) sum = fmaf(s.weight(row, h0 + i), max_nan(dot[i], s.floor), sum);
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
  float score = sums[0][lane];
#pragma unroll
  for (int w = 1; w < kFloatWarps; ++w) score += sums[w][lane];
  s.store(local, first + lane, ids[lane] < 0 ? -INFINITY : score);
}

template <class T, int kPairs>
const Kernel kScores{scores_kernel<T, kPairs>};
const Kernel kFloatScores{float_scores_kernel};

// What the scorer takes, so that both are one implementation.
Refusal refuse(const IndexScoresAtArgs& a) {
  const Tensor& q = a.index_query;
  if (q.dtype == DType::kF64) return "f64 is left to CPUs";
  if (q.shape[1] > 128) return "takes 1 to 128 index heads";
  if (q.shape[2] > 256) return "takes 1 to 256 channels";
  if (!has_unit_stride(q) || !has_unit_stride(a.index_key)) {
    return "index_query and index_key must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const IndexScoresAtArgs&) { return 0; }

void run(const IndexScoresAtArgs& a, Workspace workspace) {
  ScoresAt s(a.index_query, a.index_key, a.index_weights, a.relu);
  s.slots = SlotLists(a.topk_indices, {}, a.starts, a.ends, a.index_key.shape[0]);
  s.rows = a.index_query.shape[0];
  s.scores = a.topk_scores.as<float>();
  s.score_row = a.topk_scores.strides[0];
  s.score_slot = a.topk_scores.strides[1];
  run_scores_at("index_scores_at", s, stream_of(workspace));
}

}  // namespace

void run_scores_at(const char* operation, ScoresAt s, cudaStream_t stream) {
  const int tile = s.dtype == DType::kF32 ? kFloatSlots : kWarps * kWarpSlots;
  s.tiles = (s.slots.topk + tile - 1) / tile;
  Launch launch{.grid = grid_of(s.rows * s.tiles), .block = dim3(32 * kWarps), .stream = stream};
  with_element(s.dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      launch.block = dim3(32 * kFloatWarps);
      launch.shared_bytes = 4 * kFloatSlots * (s.dim + 1);
      kFloatScores.launch(operation, launch, s);
    } else if (s.dim <= 128) {
      kScores<T, 4>.launch(operation, launch, s);
    } else {
      kScores<T, 8>.launch(operation, launch, s);
    }
  });
}

extern const Implementation<IndexScoresAtArgs> index_scores_at_implementation;
const Implementation<IndexScoresAtArgs> index_scores_at_implementation = {"cuda.portable", refuse,
                                                                          workspace_bytes, run};

}  // namespace winnow::cuda
