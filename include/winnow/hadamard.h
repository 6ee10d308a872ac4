// hadamard: the orthogonal rotation that spreads outliers over all channels before quantisation.
//
//   output[.., j] = dim^-0.5 * sum_i (-1)^popcount(i & j) * input[.., i]
//
// - The Sylvester matrix in natural order; symmetric and orthogonal: it is its own inverse and its
//   own backward. dim must be a power of two.
// - Computed in f32 (f64 for f64 inputs) and rounded once to the dtype of the output. Sums and
//   differences at distance 1, 2, 4, ..., then one product.
// - output may be input itself (the same view): in place.
// - NaN and infinities make their row NaN or infinite, and no other row.
// - Source: the rotation of index queries and keys in DeepSeek-V3.2-Exp's published inference code;
//   the matrix is Sylvester's.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct HadamardArgs {
  Tensor input;   // [.., dim] f64 | f32 | bf16 | f16
  Tensor output;  // out: shape of input; f64 (only from f64) | f32 | bf16 | f16
};

void hadamard(const HadamardArgs& args, Workspace workspace);
std::int64_t hadamard_workspace_bytes(const HadamardArgs& args);
Explanation explain(const HadamardArgs& args);

}  // namespace winnow
