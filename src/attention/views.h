// Views of one head, and the two elementwise steps between projections and operations.
#pragma once

#include "winnow/tensor.h"

namespace winnow::attention {

// [rows, dim] of head h of t [rows, heads, dim].
Tensor head(const Tensor& t, std::int64_t h);
// [rows, heads * dim] of a contiguous [rows, heads, dim].
Tensor join_heads(const Tensor& t);
// [rows, 1, dim] of [rows, dim], which may be a view of some channels of a wider matrix.
Tensor as_one_head(const Tensor& t);

// to = from, for views [rows, heads, dim] of f32 or f64 whose last axis has stride 1.
void copy(const Tensor& from, const Tensor& to);
// t *= factor, contiguous.
void scale(const Tensor& t, double factor);

}  // namespace winnow::attention
