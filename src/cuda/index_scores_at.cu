// index_scores_at on GPUs: the scorer's arithmetic (scorer.cu, scorer_f32.cu) over keys that a list names.
//
//   16 bits   a warp takes 16 slots of a row as left operands, in registers, and goes through the heads,
//             8 at a time, as right operands
//   f32       a block takes 32 slots of a row; their keys lie in shared memory, a lane has a slot
//
// Order: that of the scorer, so that a score has the bits that index_scores gives it. 16 bits: lane c of a
//   quad takes channels 8 c to 8 c + 7 of each 32; lane c sums heads 8 b + 2 c and 8 b + 2 c + 1, each in one
//   FMA chain over b ascending; then both, then lanes c and c ^ 1, then c ^ 2; then parts of 64 heads
//   (32 where channels exceed 128). f32: one FMA chain over channels; warp w sums heads
//   32 n + 4 w + {0, 1, 2, 3} in one chain; then the warps ascending.
// Floor: 2 * heads * dim FLOPs per slot at the rate of mma (FMA in f32); 1.2 ms for 4096 rows of 2048 slots
//   and 64 heads of 128 (H200). Bound by the queries, which every warp reads out of the L1.
#include "base/implementation.h"
#include "cuda/attention.h"
#include "cuda/kernel.h"
#include "winnow/index_scores_at.h"

namespace winnow::cuda {
namespace {

struct Scores {
  SlotLists slots;
  std::int64_t rows, tiles;  // of slots
  const void *query, *key, *weights;
  std::int64_t query_row, query_head, key_row, weight_row, weight_head;
  bool bf16_weights, vectors;  // vectors: all rows begin at multiples of 16 bytes
  int heads, dim;
  float floor;  // max(dot, floor): 0, or -inf without ReLU
  float* scores;
  std::int64_t score_row, score_slot;

  __device__ float weight(std::int64_t row, int head) const {
    const std::int64_t at = row * weight_row + head * weight_head;
    return bf16_weights ? to_float(static_cast<const BF16*>(weights)[at])
                        : static_cast<const float*>(weights)[at];
  }
  // The id of a slot that counts, else -1.
  __device__ std::int64_t id(const RowSlots& list, std::int64_t slot) const {
    return slot < list.count ? list[slot] : -1;
  }
  __device__ void store(std::int64_t row, std::int64_t slot, float score) const {
    if (slot < slots.topk) scores[row * score_row + slot * score_slot] = score;
  }
};

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
__global__ void __launch_bounds__(32 * kWarps) scores_kernel(const Scores s) {
  constexpr int kPartHeads = kPairs > 4 ? 32 : 64;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const std::int64_t row = block_index() / s.tiles;
  if (row >= s.rows) return;
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
  if (c < 2) s.store(row, first + g + 8 * c, (c == 0 ? ids[0] : ids[1]) < 0 ? -INFINITY : score);
}

__global__ void __launch_bounds__(32 * kFloatWarps) float_scores_kernel(const Scores s) {
  extern __shared__ float keys[];  // [kFloatSlots][dim + 1]
  __shared__ float sums[kFloatWarps][kFloatSlots];
  __shared__ std::int64_t ids[kFloatSlots];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = s.dim + 1;
  const std::int64_t row = block_index() / s.tiles;
  if (row >= s.rows) return;
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
  s.store(row, first + lane, ids[lane] < 0 ? -INFINITY : score);
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
  Scores s{};
  const Tensor &q = a.index_query, &k = a.index_key, &w = a.index_weights;
  const int tile = q.dtype == DType::kF32 ? kFloatSlots : kWarps * kWarpSlots;
  s.slots = SlotLists(a.topk_indices, {}, a.starts, a.ends, k.shape[0]);
  s.rows = q.shape[0];
  s.tiles = (a.topk_indices.shape[1] + tile - 1) / tile;
  s.query = q.data;
  s.query_row = q.strides[0];
  s.query_head = q.strides[1];
  s.key = k.data;
  s.key_row = k.strides[0];
  s.weights = w.data;
  s.weight_row = w.strides[0];
  s.weight_head = w.strides[1];
  s.bf16_weights = w.dtype == DType::kBF16;
  s.vectors = has_vector_rows(q) && has_vector_rows(k);
  s.heads = static_cast<int>(q.shape[1]);
  s.dim = static_cast<int>(q.shape[2]);
  s.floor = a.relu ? 0 : -INFINITY;
  s.scores = a.topk_scores.as<float>();
  s.score_row = a.topk_scores.strides[0];
  s.score_slot = a.topk_scores.strides[1];
  Launch launch{.grid = grid_of(s.rows * s.tiles),
                .block = dim3(32 * kWarps),
                .stream = stream_of(workspace)};
  constexpr char kName[] = "index_scores_at";
  with_element(q.dtype, [&]<class T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      launch.block = dim3(32 * kFloatWarps);
      launch.shared_bytes = 4 * kFloatSlots * (s.dim + 1);
      kFloatScores.launch(kName, launch, s);
    } else if (s.dim <= 128) {
      kScores<T, 4>.launch(kName, launch, s);
    } else {
      kScores<T, 8>.launch(kName, launch, s);
    }
  });
}

}  // namespace

extern const Implementation<IndexScoresAtArgs> index_scores_at_implementation;
const Implementation<IndexScoresAtArgs> index_scores_at_implementation = {"cuda.portable", refuse,
                                                                          workspace_bytes, run};

}  // namespace winnow::cuda
