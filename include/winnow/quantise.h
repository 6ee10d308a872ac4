// quantise: numbers to E4M3 with one scale for each group of consecutive channels.
//
//   amax  = max(largest |input| of the group, amax_floor)
//   scale = amax / 448, rounded to f32                          or, with power_of_two,
//           2^max(-127, ceil(log2(amax / 448))), exactly
//   data  = E4M3(input / scale), the quotient in f32, to nearest even, saturated at +-448
//
// - The shape of `scale` says how long a group is: dim / groups channels.
//   One group, f32: FP8 with a scale per row. Groups of 32, e8m0, power_of_two: MXFP8 (MX block
//   format, OCP Microscaling v1.0, with the scale rounded up, so that nothing saturates).
// - A group of zeros has scale 0 (power_of_two: 2^-127, the byte 0) and data 0. Zero keeps its
//   sign. So does a group whose amax / 448 is no f32 above 0.
// - A group that holds NaN or an infinity is NaN: its scale and all of its data. Scores of such a
//   key are NaN, and NaN is never selected. Other groups do not notice.
// - Every implementation gives the same bits.
// - Source: FP8 with power-of-two scales as in DeepSeek-V3.2-Exp's published inference code; MXFP8:
//   OCP Microscaling Formats (MX) v1.0.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct QuantiseArgs {
  Tensor input;           // [.., dim] f32 | bf16 | f16
  bool power_of_two{};    // required for an e8m0 scale; without default meaning: say which
  double amax_floor = 0;  // models that quantise pooled keys use 1e-4
  Tensor data;            // out: e4m3, shape of input
  Tensor scale;           // out: f32 | e8m0 [.., groups]; groups divides dim
};

void quantise(const QuantiseArgs& args, Workspace workspace);
std::int64_t quantise_workspace_bytes(const QuantiseArgs& args);
Explanation explain(const QuantiseArgs& args);

}  // namespace winnow
