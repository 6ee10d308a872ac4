// matmul: C = A . B, or C += A . B, on the register-tiled kernel that the indexer's scorer uses
// too.
//
// - A [M, K], B [K, N], C [M, N], all f32 or all f64; any strides, so a transposed view is a
//   transposed operand. C shares no memory with A or B.
// - f32 is fast where one axis of A and of B has stride 1 and C's last axis has, whatever the other
//   strides; the rest, and f64, run in the reference, which sums in double.
// - Every element of the fast path is one chain of multiply-adds over k ascending (fused on AVX2),
//   from +0, or from C's value when accumulating: it depends on its row of A, its column of B and K
//   only, never on M, N, the tiling or the threads.
// - Scratch memory is kept per calling thread, as large as its largest call needed.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow::nn {

void matmul(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate = false);
// Who would run this call, and why the others would not ("cpu.avx2", "cpu.portable", "reference").
Explanation explain_matmul(const Tensor& a, const Tensor& b, const Tensor& c,
                           bool accumulate = false);

// The scratch memory of this call.
std::int64_t matmul_scratch_bytes(const Tensor& a, const Tensor& b, const Tensor& c,
                                  bool accumulate = false);

// y [rows, out] = x [rows, in] . weight [out, in]^T. Leading axes of x and y are rows.
void linear(const Tensor& x, const Tensor& weight, const Tensor& y);

// d_x = d_y . weight (may be left out; added to d_x where accumulate_x), d_weight += d_y^T . x (may
// be left out).
void linear_backward(const Tensor& x, const Tensor& weight, const Tensor& d_y, const Tensor& d_x,
                     const Tensor& d_weight, bool accumulate_x = false);

}  // namespace winnow::nn
