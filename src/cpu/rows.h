// Loops of nn over one row of f32 that are worth an instruction set of their own: those with exp.
#pragma once

#include <cstdint>

namespace winnow {

struct RowFunctions {
  // y = silu(gate) * up; y may be gate or up.
  void (*swiglu)(const float* gate, const float* up, float* y, std::int64_t n);
  // d_gate and d_up may be any of the inputs.
  void (*swiglu_backward)(const float* gate, const float* up, const float* d_y, float* d_gate,
                          float* d_up, std::int64_t n);
  // The largest element; n >= 1. A NaN may or may not win.
  float (*maximum)(const float* x, std::int64_t n);
  // sum_j exp(x[j] - top), in double, in a fixed order. The terms are kept in `terms` unless it is
  // null; it may be x.
  double (*sum_of_exp)(const float* x, float top, float* terms, std::int64_t n);
};

namespace cpu::portable {
extern const RowFunctions row_functions;
}
namespace cpu::avx2 {
extern const RowFunctions row_functions;
}

}  // namespace winnow
