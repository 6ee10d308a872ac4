// What a GPU does at best: products in registers, streams of 16 bytes a thread through memory.
#include "cuda/machine_speed.h"

#include "cuda/kernel.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kChains = 8;  // independent products of a warp

__global__ void __launch_bounds__(kThreads) product_loop(std::int64_t steps, float* sink) {
  float sums[kChains][4] = {};
  // Numbers near 1 with fractions in every bit: products of zeros would draw less power.
  std::uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = 0x3f853f91u + threadIdx.x * 0x00030005u + i;
  for (int i = 0; i < 2; ++i) b[i] = 0xbf893f85u + threadIdx.x * 0x00050003u + i;
  for (std::int64_t s = 0; s < steps; ++s) {
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  float all = 0;
  for (const auto& sum : sums) all += sum[0] + sum[1] + sum[2] + sum[3];
  if (all == 12345.f) *sink = all;  // keeps the loop
}

__global__ void __launch_bounds__(kThreads) read_loop(const float4* p, std::int64_t n,
                                                      std::int64_t passes, float* sink) {
  float all = 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t pass = 0; pass < passes; ++pass) {
#pragma unroll 4
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
         i += step) {
      const float4 x = __ldcg(p + i);
      all += x.x + x.y + x.z + x.w;
    }
  }
  if (all == 12345.f) *sink = all;
}

__global__ void __launch_bounds__(kThreads) write_loop(float4* p, std::int64_t n,
                                                       std::int64_t passes) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    const auto x = static_cast<float>(pass);
#pragma unroll 4
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n;
         i += step) {
      __stcg(p + i, make_float4(x, x, x, x));
    }
  }
}

const Kernel kProducts{product_loop};
const Kernel kReads{read_loop};
const Kernel kWrites{write_loop};

Launch whole_device() {
  return {.grid = dim3(static_cast<unsigned>(processors() * 4)), .block = dim3(kThreads)};
}

}  // namespace

double queue_products(std::int64_t steps, float* sink) {
  const Launch launch = whole_device();
  kProducts.launch("machine", launch, steps, sink);
  const double warps = static_cast<double>(launch.grid.x) * kThreads / 32;
  return warps * static_cast<double>(steps) * kChains * 2 * 16 * 8 * 16;
}

void queue_reads(const float* p, std::int64_t n, std::int64_t passes, float* sink) {
  kReads.launch("machine", whole_device(), reinterpret_cast<const float4*>(p), n / 4, passes, sink);
}

void queue_writes(float* p, std::int64_t n, std::int64_t passes) {
  kWrites.launch("machine", whole_device(), reinterpret_cast<float4*>(p), n / 4, passes);
}

}  // namespace winnow::cuda
