// The register tile under every product: MR rows, broadcast, times a panel of 16 columns, lanes.
//
//   panel [K][16] f32: 16 columns (keys, output features, value channels) side by side for each k
//   tile  [K][MR] f32: MR <= kTileRows rows side by side for each k
//
// AVX2, 6 x 16: 12 accumulators, 2 panel vectors and 1 broadcast are 15 of the 16 registers; 8
// loads and 12 FMAs per k, so the FMA units bound it. AVX-512, 14 x 16: 14 accumulators hide the
// latency of both FMA units; the 15 loads per k take as long as the FMAs. Order of every sum: one
// FMA chain per element, k ascending from +0. Neither MR, nor the panel, nor the number of rows or
// threads enters, so any tiling gives the same bits.
#pragma once

#include "cpu/simd.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr int kPanel = 16;  // columns of a panel
// Most rows of a tile: what the registers hold. More would spill, and compile for minutes.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 14;
#elif defined(__AVX2__)
inline constexpr int kTileRows = 6;
#else
inline constexpr int kTileRows = 2;  // of SSE2's 16 four-lane registers: 8 + 4 + 1
#endif

WINNOW_INLINE std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
WINNOW_INLINE std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// The last axis is laid side by side (or left out, or has one element at most).
WINNOW_INLINE bool has_unit_stride(const Tensor& t) {
  return t.empty() || t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1;
}

// Calls f with a null pointer to the element type of a tensor: f32, bf16 or f16, as kernels take.
template <class F>
WINNOW_INLINE void with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kBF16: f(static_cast<const BF16*>(nullptr)); break;
    case DType::kF16: f(static_cast<const F16*>(nullptr)); break;
    default: f(static_cast<const float*>(nullptr)); break;
  }
}

WINNOW_INLINE void transpose8(F8 (&r)[8]) {
#if defined(__AVX2__)
  const __m256 t0 = _mm256_unpacklo_ps(r[0], r[1]), t1 = _mm256_unpackhi_ps(r[0], r[1]);
  const __m256 t2 = _mm256_unpacklo_ps(r[2], r[3]), t3 = _mm256_unpackhi_ps(r[2], r[3]);
  const __m256 t4 = _mm256_unpacklo_ps(r[4], r[5]), t5 = _mm256_unpackhi_ps(r[4], r[5]);
  const __m256 t6 = _mm256_unpacklo_ps(r[6], r[7]), t7 = _mm256_unpackhi_ps(r[6], r[7]);
  const __m256 u0 = _mm256_shuffle_ps(t0, t2, 0x44), u1 = _mm256_shuffle_ps(t0, t2, 0xEE);
  const __m256 u2 = _mm256_shuffle_ps(t1, t3, 0x44), u3 = _mm256_shuffle_ps(t1, t3, 0xEE);
  const __m256 u4 = _mm256_shuffle_ps(t4, t6, 0x44), u5 = _mm256_shuffle_ps(t4, t6, 0xEE);
  const __m256 u6 = _mm256_shuffle_ps(t5, t7, 0x44), u7 = _mm256_shuffle_ps(t5, t7, 0xEE);
  r[0] = _mm256_permute2f128_ps(u0, u4, 0x20);
  r[4] = _mm256_permute2f128_ps(u0, u4, 0x31);
  r[1] = _mm256_permute2f128_ps(u1, u5, 0x20);
  r[5] = _mm256_permute2f128_ps(u1, u5, 0x31);
  r[2] = _mm256_permute2f128_ps(u2, u6, 0x20);
  r[6] = _mm256_permute2f128_ps(u2, u6, 0x31);
  r[3] = _mm256_permute2f128_ps(u3, u7, 0x20);
  r[7] = _mm256_permute2f128_ps(u3, u7, 0x31);
#else
  float in[64], out[64];  // through memory: lane by lane in registers compiles for minutes
#pragma GCC unroll 1
  for (int i = 0; i < 8; ++i) store(in + 8 * i, r[i]);
#pragma GCC unroll 1
  for (int i = 0; i < 64; ++i) out[i] = in[i % 8 * 8 + i / 8];
#pragma GCC unroll 1
  for (int i = 0; i < 8; ++i) r[i] = load(out + 8 * i);
#endif
}

// 16 rows of length K -> panel [K][16]. Spare lanes repeat a valid row: no lane reads another lane,
// and a test per row inside this loop costs 10 % of an attention call.
template <class T>
WINNOW_INLINE void pack_panel(const T* const* row, std::int64_t K, float* out) {
  std::int64_t k = 0;
#if defined(__AVX2__)  // elsewhere the compiler's own loop is as good, and much less code
  auto step = [&](std::int64_t at, int group) __attribute__((always_inline)) {
    F8 r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = load(row[group + i] + at);
    transpose8(r);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store(out + (at + i) * kPanel + group, r[i]);
  };
  // Eight rows at a time, whole cache lines: rows a multiple of 4 KiB apart share one L1 set.
  constexpr int kLine = 64 / sizeof(T);
  for (; k + kLine <= K; k += kLine) {
#pragma GCC unroll 2
    for (int group = 0; group < kPanel; group += 8) {
#pragma GCC unroll 4
      for (int u = 0; u < kLine; u += 8) step(k + u, group);
    }
  }
  for (; k + 8 <= K; k += 8) {
    step(k, 0);
    step(k, 8);
  }
#endif
#pragma GCC unroll 1
  for (; k < K; ++k) {
    for (int i = 0; i < kPanel; ++i) out[k * kPanel + i] = to_float(row[i][k]);
  }
}

// `valid` (>= 1) rows that lie `stride` elements apart; the spare ones repeat the last.
template <class T>
WINNOW_INLINE void pack_panel(const T* base, std::int64_t stride, std::int64_t valid,
                              std::int64_t K, float* out) {
  const T* row[kPanel];
  for (int i = 0; i < kPanel; ++i) row[i] = base + min64(i, valid - 1) * stride;
  pack_panel(row, K, out);
}

// Floats that pack_tile may write past the end of its tile: give the buffer that slack.
inline constexpr int kTileSlack = (kTileRows + 7) / 8 * 8;

// mr rows -> tile [K][mr].
template <class T>
WINNOW_INLINE void pack_tile(const T* const* row, int mr, std::int64_t K, float* out) {
  std::int64_t k = 0;
#if defined(__AVX2__)
  constexpr int kGroups = kTileSlack / 8;
  for (; k + 8 <= K; k += 8) {
    F8 r[kGroups][8];
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) r[g][i] = g * 8 + i < mr ? load(row[g * 8 + i] + k) : zero8();
      transpose8(r[g]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // ascending: what runs over is written again
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) store(out + (k + i) * mr + g * 8, r[g][i]);
    }
  }
#endif
#pragma GCC unroll 1
  for (; k < K; ++k) {
    for (int i = 0; i < mr; ++i) out[k * mr + i] = to_float(row[i][k]);
  }
}

// Rows that lie `stride` elements apart.
template <class T>
WINNOW_INLINE void pack_tile(const T* base, std::int64_t stride, int mr, std::int64_t K,
                             float* out) {
  const T* row[kTileSlack] = {};
  for (int i = 0; i < mr; ++i) row[i] = base + i * stride;
  pack_tile(row, mr, K, out);
}

// An even split of `rows` into tiles of at most kTileRows: no small last tile (64 = 9 x 6 + 2 x 5).
struct Tiles {
  int count, base, extra;
  explicit Tiles(int rows)
      : count((rows + kTileRows - 1) / kTileRows),
        base(count > 0 ? rows / count : 0),
        extra(count > 0 ? rows % count : 0) {}
  int rows(int t) const { return base + (t < extra ? 1 : 0); }
  int total() const { return count * base + extra; }
  int first(int t) const { return t * base + (t < extra ? t : extra); }
};

// acc[r][lane] += sum_k A(k, r) * panel[k][lane], A(k, r) = a[k * a_k + r * a_r].
template <int MR>
WINNOW_INLINE void multiply_tile(const float* a, std::int64_t a_k, std::int64_t a_r,
                                 const float* panel, std::int64_t K, Wide (&acc)[MR]) {
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < K; ++k) {
    const Wide b = load16(panel);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r] = fma(splat16(a[r * a_r]), b, acc[r]);
    a += a_k;
    panel += kPanel;
  }
}

// Calls f.template operator()<MR>() for a run-time mr in 1..kTileRows.
template <int MR = kTileRows, class F>
WINNOW_INLINE void with_rows(int mr, F&& f) {
  if constexpr (MR > 1) {
    if (mr < MR) return with_rows<MR - 1>(mr, f);
  }
  f.template operator()<MR>();
}

// Prefetch cursor over at most 16 rows, a few lines per step between runs of FMAs. One burst per
// row fills the miss buffers and stalls the kernel; spread out, a gather costs almost nothing.
struct Prefetcher {
  const char* row[kPanel];
  int count = 0, at = 0;
  std::int64_t offset = 0, row_bytes;
  explicit Prefetcher(std::int64_t bytes) : row_bytes(bytes) {}
  WINNOW_INLINE void add(const void* p) { row[count++] = static_cast<const char*>(p); }
  WINNOW_INLINE void step(int lines) {
    for (; lines > 0 && at < count; --lines) {
      prefetch_l2(row[at] + offset);
      if ((offset += 64) >= row_bytes) {
        offset = 0;
        ++at;
      }
    }
  }
};

// Cuts one buffer into parts of 64-byte multiples; with no buffer it only counts.
class Carve {
 public:
  explicit Carve(void* memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    base_ = memory == nullptr ? 0 : (address + 63) / 64 * 64;
  }
  template <class T>
  T* take(std::int64_t elements) {
    T* p = base_ == 0 ? nullptr : reinterpret_cast<T*>(base_ + static_cast<std::uintptr_t>(used_));
    used_ += (elements * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return p;
  }
  std::int64_t used() const { return used_; }
  std::int64_t bytes_to_ask() const { return used_ + 63; }  // a workspace needs no alignment

 private:
  std::uintptr_t base_;
  std::int64_t used_ = 0;
};

}  // namespace winnow::cpu::WINNOW_ISA
