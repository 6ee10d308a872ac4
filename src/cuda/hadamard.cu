// hadamard on GPUs: sums and differences of pairs at distance 1, 2, 4, ..., then the scale.
//
// Up to 1024 channels a row takes a part of a warp, with `kValues` consecutive channels in each
// lane: the first distances lie inside a lane, the others between lanes. Longer rows take a block,
// in shared memory. Every row is read before it is written, so the output may be the input. 4 to 8
// bytes of memory and log2(dim) additions a channel: memory bounds it.
#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "winnow/hadamard.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8;      // of a block
constexpr int kThreads = 256;  // of the block of a long row
constexpr std::int64_t kLongest = 32768;

struct Rotation {
  const void* input;
  void* output;
  DType in_type, out_type;
  Rows in_rows, out_rows;
  std::int64_t rows;
  int dim;
  float scale;  // dim^-0.5
};

template <int kValues>
__device__ void load_values(const Rotation& r, std::int64_t from, float (&x)[kValues]) {
  if constexpr (kValues == 1) {
    x[0] = load_float(r.input, r.in_type, from);
  } else {
    load_floats(r.input, r.in_type, from, kValues, x);
  }
}
template <int kValues>
__device__ void store_values(const Rotation& r, std::int64_t to, const float (&x)[kValues]) {
  if constexpr (kValues == 1) {
    store_float(r.output, r.out_type, to, x[0]);
  } else {
    store_floats(r.output, r.out_type, to, kValues, x);
  }
}

template <int kValues>
__global__ void __launch_bounds__(32 * kWarps) rotate_in_lanes(Rotation r) {
  const int lanes = r.dim / kValues;  // of a row: 1 to 32
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * (32 * kWarps) + threadIdx.x;
  const std::int64_t row = thread / lanes;
  const bool mine = row < r.rows;
  const int member = threadIdx.x % lanes, first = member * kValues;
  float x[kValues] = {};
  if (mine) load_values(r, r.in_rows.offset(row) + first, x);
#pragma unroll
  for (int half = 1; half < kValues; half *= 2) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      if ((v & half) != 0) continue;
      const float a = x[v], b = x[v + half];
      x[v] = a + b;
      x[v + half] = a - b;
    }
  }
  for (int step = 1; step < lanes; step *= 2) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const float other = __shfl_xor_sync(0xffffffffu, x[v], step);
      x[v] = (member & step) != 0 ? other - x[v] : x[v] + other;
    }
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) x[v] *= r.scale;
  if (mine) store_values(r, r.out_rows.offset(row) + first, x);
}

__global__ void __launch_bounds__(kThreads) rotate_in_a_block(Rotation r) {
  extern __shared__ float shared[];
  const std::int64_t from = r.in_rows.offset(blockIdx.x), to = r.out_rows.offset(blockIdx.x);
  for (int j = threadIdx.x; j < r.dim; j += kThreads)
    shared[j] = load_float(r.input, r.in_type, from + j);
  for (int half = 1; half < r.dim; half *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < r.dim / 2; pair += kThreads) {
      const int j = pair / half * 2 * half + pair % half;
      const float a = shared[j], b = shared[j + half];
      shared[j] = a + b;
      shared[j + half] = a - b;
    }
  }
  __syncthreads();
  for (int j = threadIdx.x; j < r.dim; j += kThreads)
    store_float(r.output, r.out_type, to + j, shared[j] * r.scale);
}

const Kernel kRotate1{rotate_in_lanes<1>}, kRotate8{rotate_in_lanes<8>},
    kRotate32{rotate_in_lanes<32>};
const Kernel kRotateLong{rotate_in_a_block, kLongest * 4};

Refusal refuse(const HadamardArgs& a) {
  if (a.input.dtype == DType::kF64) return "f64 is left to CPUs";
  if (!has_unit_stride(a.input) || !has_unit_stride(a.output)) {
    return "input and output must have stride 1 on their last axis";
  }
  if (a.input.shape[a.input.rank - 1] > kLongest) return "dim must be at most 32768";
  return {};
}

std::int64_t workspace_bytes(const HadamardArgs&) { return 0; }

void run(const HadamardArgs& a, Workspace workspace) {
  const std::int64_t dim = a.input.shape[a.input.rank - 1];
  const Rows rows(a.input);
  const Rotation r{a.input.data,
                   a.output.data,
                   a.input.dtype,
                   a.output.dtype,
                   rows,
                   Rows(a.output),
                   rows.count(),
                   static_cast<int>(dim),
                   static_cast<float>(1 / sqrt(static_cast<double>(dim)))};
  constexpr char kName[] = "hadamard";
  if (dim > 1024) {
    kRotateLong.launch(kName,
                       {.grid = dim3(static_cast<unsigned>(r.rows)),
                        .block = dim3(kThreads),
                        .shared_bytes = dim * 4,
                        .stream = stream_of(workspace)},
                       r);
    return;
  }
  const int values = dim < 8 ? 1 : dim <= 256 ? 8 : 32;
  const auto& kernel = values == 1 ? kRotate1 : values == 8 ? kRotate8 : kRotate32;
  kernel.launch(
      kName,
      {.grid = dim3(static_cast<unsigned>(ceil_div(r.rows * (dim / values), 32 * kWarps))),
       .block = dim3(32 * kWarps),
       .stream = stream_of(workspace)},
      r);
}

}  // namespace

extern const Implementation<HadamardArgs> hadamard_implementation;
const Implementation<HadamardArgs> hadamard_implementation = {"cuda.portable", refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cuda
