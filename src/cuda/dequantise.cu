// dequantise on GPUs: a thread takes eight channels of a row. A code and 4 bytes of output a
// channel: memory bounds it.
#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "winnow/dequantise.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // channels of a thread

struct Dequantiser {
  const E4M3* data;
  const void* scale;
  float* output;
  bool bytes;  // e8m0 scales
  Rows data_rows, scale_rows, out_rows;
  std::int64_t rows;
  int dim, size;  // channels of a row, of a group
  int chunks;     // of a row
};

__device__ float scale_at(const Dequantiser& q, std::int64_t at) {
  return q.bytes ? to_float(static_cast<const E8M0*>(q.scale)[at])
                 : static_cast<const float*>(q.scale)[at];
}

__global__ void __launch_bounds__(kThreads) dequantise_rows(Dequantiser q) {
  const int rows = kThreads / q.chunks > 0 ? kThreads / q.chunks : 1;  // of a block
  for (int at = threadIdx.x; at < rows * q.chunks; at += kThreads) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * rows + at / q.chunks;
    if (row >= q.rows) return;
    const int first = at % q.chunks * kChunk;
    const int limit = q.dim - first < kChunk ? q.dim - first : kChunk;
    const std::int64_t scales = q.scale_rows.offset(row);
    const E4M3* data = q.data + q.data_rows.offset(row) + first;
    std::uint32_t words[2] = {};
    if (limit == kChunk && reinterpret_cast<std::uintptr_t>(data) % 8 == 0) {
      const uint2 both = *reinterpret_cast<const uint2*>(data);
      words[0] = both.x;
      words[1] = both.y;
    } else {
#pragma unroll
      for (int c = 0; c < kChunk; ++c)
        if (c < limit) words[c / 4] |= std::uint32_t{data[c].bits} << (c % 4 * 8);
    }
    const bool one_scale = q.size % kChunk == 0;
    float scale = scale_at(q, scales + first / q.size), x[kChunk] = {};
#pragma unroll
    for (int c = 0; c < kChunk; ++c) {
      if (c >= limit) break;
      if (!one_scale) scale = scale_at(q, scales + (first + c) / q.size);
      const E4M3 code{static_cast<std::uint8_t>(words[c / 4] >> (c % 4 * 8))};
      x[c] = __fmul_rn(to_float(code), scale);
    }
    store_floats(q.output, DType::kF32, q.out_rows.offset(row) + first, limit, x);
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
  const int chunks = (dim + kChunk - 1) / kChunk;
  const std::int64_t block_rows = kThreads / chunks > 0 ? kThreads / chunks : 1;
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
                      dim / static_cast<int>(a.scale.shape[a.scale.rank - 1]),
                      chunks};
  kDequantise.launch("dequantise",
                     {.grid = dim3(static_cast<unsigned>(ceil_div(q.rows, block_rows))),
                      .block = dim3(kThreads),
                      .stream = stream_of(workspace)},
                     q);
}

}  // namespace

extern const Implementation<DequantiseArgs> dequantise_implementation;
const Implementation<DequantiseArgs> dequantise_implementation = {"cuda.portable", refuse,
                                                                  workspace_bytes, run};

}  // namespace winnow::cuda
