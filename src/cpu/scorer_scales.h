// What the scorer does for E4M3: scales of MXFP8 multiplied in at packing, where they are exact,
// and the factor of a key of FP8, applied to finished scores.
#pragma once

#include "cpu/key_locator.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kScaleGroup = 32;  // channels under one scale of MXFP8

// with_element, for dtypes that the scorer takes.
template <class F>
WINNOW_INLINE void with_scorer_element(DType dtype, F&& f) {
  if (dtype == DType::kE4M3) return f(static_cast<const E4M3*>(nullptr));
  with_element(dtype, f);
}

// tile [dim][mr], as pack_tile leaves it: row r times the scales at scale + r * stride.
inline void scale_tile(const E8M0* scale, std::int64_t stride, int mr, std::int64_t dim,
                       float* tile) {
  for (std::int64_t group = 0; group < dim / kScaleGroup; ++group) {
    float factor[kTileRows];
    for (int r = 0; r < mr; ++r) factor[r] = to_float(scale[r * stride + group]);
    for (std::int64_t d = 0; d < kScaleGroup; ++d, tile += mr) {
      for (int r = 0; r < mr; ++r) tile[r] *= factor[r];
    }
  }
}

// panel [dim][16]: column i times the scales at `scale[i]`.
inline void scale_panel(const E8M0* const* scale, std::int64_t dim, float* panel) {
  for (std::int64_t group = 0; group < dim / kScaleGroup; ++group) {
    float factor[kPanel];
    for (int i = 0; i < kPanel; ++i) factor[i] = to_float(scale[i][group]);
    const F8 low = load(factor), high = load(factor + 8);
    for (std::int64_t d = 0; d < kScaleGroup; ++d, panel += kPanel) {
      store(panel, load(panel) * low);
      store(panel + 8, load(panel + 8) * high);
    }
  }
}

}  // namespace winnow::cpu::WINNOW_ISA
