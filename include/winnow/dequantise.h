// dequantise: the numbers that E4M3 data and their scales stand for.
//
//   output[.., d] = data[.., d] * scale[.., d / (dim / groups)], rounded once to f32
//
// - This product is what the quantised forms of index_scores and index_topk compute with (MXFP8),
//   or what they equal up to the order of roundings (FP8).
// - A product with a power of two is exact unless it leaves the range of f32: beyond, infinity.
// - NaN in data or scale (the code 0x7f, the byte 255) gives NaN.
// - Source: the inverse of quantise.h.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct DequantiseArgs {
  Tensor data;    // [.., dim] e4m3
  Tensor scale;   // [.., groups] f32 | e8m0; groups divides dim
  Tensor output;  // out: f32, shape of data
};

void dequantise(const DequantiseArgs& args, Workspace workspace);
std::int64_t dequantise_workspace_bytes(const DequantiseArgs& args);
Explanation explain(const DequantiseArgs& args);

}  // namespace winnow
