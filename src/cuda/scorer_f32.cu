// The scorer of f32: no tensor core multiplies f32 exactly, so these are chains of FMAs.
//
// Tile: one row against 32 keys, which lie in shared memory [32][dim + 1]; lane j has key j. Four
// heads
//   at a time per warp, their queries read alike by all lanes.
// Shared memory: 33 * (dim + 1) floats, 34 KB at 256 channels.
// Order: dot = one FMA chain over the channels ascending. Warp w has heads 32 n + 4 w + {0, 1, 2,
// 3}, in
//   one FMA chain ascending; then the eight warps ascending.
// Floor: 2 * heads * dim FLOPs per score at the rate of FMAs. Bound by the loads beside them: five
// for
//   every four FMAs.
#include "cuda/mma.h"
#include "cuda/scorer.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8, kKeys = 32, kHeads = 4;  // heads of a warp at a time
constexpr std::int64_t kSpan = 512;                // keys of a block

__global__ void __launch_bounds__(32 * kWarps)
    score_kernel(const __grid_constant__ Scorer s, std::int64_t spans) {
  extern __shared__ float shared[];
  float* sums = shared;                   // [kWarps][kKeys]
  float* keys = shared + kWarps * kKeys;  // [kKeys][dim + 1]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = s.dim, pitch = dim + 1;
  const std::int64_t row = s.first_row + blockIdx.x / spans;
  const std::int64_t first = s.first_key + blockIdx.x % spans * kSpan;
  const Range visible = s.visible(row);
  float* out = s.scores_of(row);
  const auto* query = static_cast<const float*>(s.query) + row * s.query_row;

  for (std::int64_t k0 = first; k0 < first + kSpan; k0 += kKeys) {
    if (k0 + kKeys <= visible.start || k0 >= visible.end) continue;  // alike in the block
    __syncthreads();
    for (int j = warp; j < kKeys; j += kWarps) {
      const std::int64_t at =
          visible.contains(k0 + j) ? s.places.offset(row, k0 + j) : std::int64_t{-1};
      const float* key = static_cast<const float*>(s.key) + at;
      for (int d = lane; d < dim; d += 32) keys[j * pitch + d] = at < 0 ? 0 : key[d];
    }
    __syncthreads();
    float sum = 0;
    for (int h0 = kHeads * warp; h0 < s.heads; h0 += kHeads * kWarps) {
      float dot[kHeads] = {};
      const float* q[kHeads];
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        const int head = h0 + i < s.heads ? h0 + i : h0;
        q[i] = query + head * s.query_head;
      }
#pragma unroll 4
      for (int d = 0; d < dim; ++d) {
        const float k = keys[lane * pitch + d];
#pragma unroll
        for (int i = 0; i < kHeads; ++i) dot[i] = fmaf(q[i][d], k, dot[i]);
      }
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        if (h0 + i < s.heads) sum = fmaf(s.weight(row, h0 + i), max_nan(dot[i], s.floor), sum);
      }
    }
    sums[warp * kKeys + lane] = sum;
    __syncthreads();
    const std::int64_t key = k0 + lane;
    if (warp > 0 || !visible.contains(key)) continue;
    float score = sums[lane];
    for (int w = 1; w < kWarps; ++w) score += sums[w * kKeys + lane];
    if (s.dot_scale != 1) score *= s.dot_scale;
    out[key] = s.places.offset(row, key) < 0 ? NAN : score;
  }
}

const Kernel kScore{score_kernel};

}  // namespace

void score_f32(const char* operation, const Scorer& s, cudaStream_t stream) {
  const std::int64_t spans = (s.last_key - s.first_key + kSpan - 1) / kSpan;
  const std::int64_t blocks = (s.last_row - s.first_row) * spans;
  kScore.launch(operation,
                {.grid = dim3(static_cast<unsigned>(blocks)),
                 .block = dim3(32 * kWarps),
                 .shared_bytes = 4 * (kWarps * kKeys + kKeys * (s.dim + 1)),
                 .stream = stream},
                s, spans);
}

}  // namespace winnow::cuda
