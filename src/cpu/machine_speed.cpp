// The bare rates of one core: multiply-adds that touch registers only, reads, writes.
//
// Multiply-adds: independent chains that hide the latency (12 registers; portable code
// on SSE2 holds 6 chains in 12). Reads: 8 sums, one load each, so the load ports or the memory
// bound it. Writes: plain stores, as kernels make them; a missed line is read before.
#include "base/speed_loops.h"
#include "cpu/simd.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

#if defined(__AVX2__)
constexpr int kChains = 12;
#else
constexpr int kChains = 6;
#endif
#if defined(__AVX512F__)
using V = Wide;
V lanes(float x) { return splat16(x); }
F8 first8(V x) { return low8(x); }
#else
using V = F8;
V lanes(float x) { return splat(x); }
F8 first8(V x) { return x; }
#endif
constexpr int kLine = 64;  // floats per step of the memory loops

float multiply(std::int64_t steps) {
  V acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = lanes(static_cast<float>(i + 1));
  const V a = lanes(0.999f), b = lanes(0.001f);  // stays near 1: no subnormals, no overflow
  for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = fma(acc[i], a, b);
  }
  float sum = 0;
  for (int i = 0; i < kChains; ++i) sum += first8(acc[i])[0];
  return sum;
}

float read(const float* p, std::int64_t n) {
  F8 acc[8] = {};
  for (std::int64_t i = 0; i < n; i += kLine) {
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) acc[u] += load(p + i + 8 * u);
  }
  F8 sum = zero8();
  for (int u = 0; u < 8; ++u) sum += acc[u];
  return sum8(sum);
}

void write(float* p, std::int64_t n, float value) {
  const F8 v = splat(value);
  for (std::int64_t i = 0; i < n; i += kLine) {
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u) store(p + i + 8 * u, v);
  }
}

}  // namespace

extern const SpeedLoops speed_loops;
const SpeedLoops speed_loops = {WINNOW_STRING(WINNOW_ISA),
                                kChains * 2 * std::int64_t{sizeof(V) / 4}, multiply, read, write};

}  // namespace winnow::cpu::WINNOW_ISA
