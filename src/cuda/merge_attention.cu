// merge_attention on GPUs: a warp for each row and head, a channel for each lane.
//
// Order: maximum exact; weight = exp of the rounded difference; the sum of the weights and each
// channel are chains over the parts ascending, the channel's of FMAs; then times 1 / sum. Every
// element is read once and takes part in one FMA, so memory bounds it. The lses of a head are read
// again for every 32 channels, out of the cache.
#include "winnow/merge_attention.h"

#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 4;  // of a block

// Strides in elements; the last axis of the outputs has stride 1.
template <class T, class Out>
struct Merge {
  std::int64_t parts, rows, heads, dim_v;
  const T* part_output;
  std::int64_t part_stride, part_row, part_head;
  const float* part_lse;
  std::int64_t lse_part, lse_row, lse_head;
  Out* output;
  std::int64_t output_row, output_head;
  float* lse;
  std::int64_t out_lse_row, out_lse_head;
};

template <class T, class Out>
__global__ void __launch_bounds__(32 * kWarps) merge_kernel(Merge<T, Out> m) {
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (pair >= m.rows * m.heads) return;
  const std::int64_t i = pair / m.heads, h = pair % m.heads;
  const float* part_lse = m.part_lse + i * m.lse_row + h * m.lse_head;

  float maximum = -INFINITY;
  std::int64_t count = 0, only = 0;
  for (std::int64_t p = 0; p < m.parts; ++p) {
    const float lse = part_lse[p * m.lse_part];
    if (lse == -INFINITY) continue;
    ++count;
    only = p;
    maximum = lse > maximum ? lse : maximum;
  }
  float sum = 0;
  for (std::int64_t p = 0; p < m.parts && count > 1; ++p) {
    const float lse = part_lse[p * m.lse_part];
    if (lse != -INFINITY) sum += expf(lse - maximum);
  }
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    m.lse[i * m.out_lse_row + h * m.out_lse_head] =
        count == 0 ? -INFINITY : count == 1 ? part_lse[only * m.lse_part] : maximum + logf(sum);
  }
  const T* row = m.part_output + i * m.part_row + h * m.part_head;
  Out* out = m.output + i * m.output_row + h * m.output_head;
  const float inverse = 1 / sum;
  for (std::int64_t c = lane; c < m.dim_v; c += 32) {
    float x = 0;
    if (count == 1) {
      x = to_float(row[only * m.part_stride + c]);
    } else if (count > 1) {
      for (std::int64_t p = 0; p < m.parts; ++p) {
        const float lse = part_lse[p * m.lse_part];
        if (lse == -INFINITY) continue;
        x = fmaf(expf(lse - maximum), to_float(row[p * m.part_stride + c]), x);
      }
      x = inverse * x;
    }
    out[c] = from_float<Out>(x);
  }
}

template <class T, class Out>
const Kernel kMerge{merge_kernel<T, Out>};

Refusal refuse(const MergeAttentionArgs& a) {
  if (a.part_output.dtype == DType::kF64) return "f64 is left to CPUs";
  if (!has_unit_stride(a.part_output) || !has_unit_stride(a.output)) {
    return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const MergeAttentionArgs&) { return 0; }

template <class T, class Out>
void run_typed(const MergeAttentionArgs& a, cudaStream_t stream) {
  const auto& in = a.part_output;
  const Merge<T, Out> m{in.shape[0],       in.shape[1],           in.shape[2],
                        in.shape[3],       in.as<T>(),            in.strides[0],
                        in.strides[1],     in.strides[2],         a.part_lse.as<float>(),
                        a.part_lse.strides[0], a.part_lse.strides[1], a.part_lse.strides[2],
                        a.output.as<Out>(),    a.output.strides[0],   a.output.strides[1],
                        a.lse.as<float>(),     a.lse.strides[0],      a.lse.strides[1]};
  const std::int64_t blocks = (m.rows * m.heads + kWarps - 1) / kWarps;
  kMerge<T, Out>.launch("merge_attention",
                        {.grid = dim3(static_cast<unsigned>(blocks)),
                         .block = dim3(32 * kWarps),
                         .stream = stream},
                        m);
}

void run(const MergeAttentionArgs& a, Workspace workspace) {
  with_element(a.part_output.dtype, [&]<class T>(T) {
    if (a.output.dtype == DType::kF32) {
      run_typed<T, float>(a, stream_of(workspace));
    } else {
      run_typed<T, T>(a, stream_of(workspace));
    }
  });
}

}  // namespace

extern const Implementation<MergeAttentionArgs> merge_attention_implementation;
const Implementation<MergeAttentionArgs> merge_attention_implementation = {
    "cuda.portable", refuse, workspace_bytes, run};

}  // namespace winnow::cuda
