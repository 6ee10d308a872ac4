// dequantise on GPUs: a warp for each row, four channels a lane. A code and 4 bytes of output a
// channel: memory bounds it.
#include "winnow/dequantise.h"

#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8;  // of a block, a row each
constexpr int kChunk = 4;  // channels that a lane takes at a time

struct Dequantiser {
  const E4M3* data;
  const void* scale;
  float* output;
  bool bytes;  // e8m0 scales
  Rows data_rows, scale_rows, out_rows;
  std::int64_t rows;
  int dim, size;  // channels of a row, of a group
};

__global__ void __launch_bounds__(32 * kWarps) dequantise_rows(Dequantiser q) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= q.rows) return;
  const std::int64_t from = q.data_rows.offset(row), to = q.out_rows.offset(row),
                     scales = q.scale_rows.offset(row);
  for (int first = threadIdx.x % 32 * kChunk; first < q.dim; first += 32 * kChunk) {
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      const int d = first + c;
      if (d >= q.dim) break;
      const std::int64_t at = scales + d / q.size;
      const float scale = q.bytes ? to_float(static_cast<const E8M0*>(q.scale)[at])
                                  : static_cast<const float*>(q.scale)[at];
      q.output[to + d] = __fmul_rn(to_float(q.data[from + d]), scale);
    }
  }
}

const Kernel kDequantise{dequantise_rows};

Refusal refuse(const DequantiseArgs& a) {
  if (!has_unit_stride(a.data) || !has_unit_stride(a.scale) || !has_unit_stride(a.output)) {
    return "data, scale and output must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const DequantiseArgs&) { return 0; }

void run(const DequantiseArgs& a, Workspace workspace) {
  const auto dim = static_cast<int>(a.data.shape[a.data.rank - 1]);
  const Rows rows(a.data);
  const Dequantiser q{a.data.as<E4M3>(),
                      a.scale.data,
                      a.output.as<float>(),
                      a.scale.dtype == DType::kE8M0,
                      rows,
                      Rows(a.scale),
                      Rows(a.output),
                      rows.count(),
                      dim,
                      dim / static_cast<int>(a.scale.shape[a.scale.rank - 1])};
  kDequantise.launch("dequantise",
                     {.grid = dim3(static_cast<unsigned>(ceil_div(q.rows, kWarps))),
                      .block = dim3(32 * kWarps),
                      .stream = stream_of(workspace)},
                     q);
}

}  // namespace

extern const Implementation<DequantiseArgs> dequantise_implementation;
const Implementation<DequantiseArgs> dequantise_implementation = {"cuda.portable", refuse,
                                                                  workspace_bytes, run};

}  // namespace winnow::cuda
