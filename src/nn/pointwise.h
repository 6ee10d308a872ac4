// SwiGLU, addition: element by element; f32 or f64, contiguous.
#pragma once

#include "winnow/tensor.h"

namespace winnow::nn {

// y = silu(gate) * up, with silu(x) = x / (1 + exp(-x)).
void swiglu(const Tensor& gate, const Tensor& up, const Tensor& y);
void swiglu_backward(const Tensor& gate, const Tensor& up, const Tensor& d_y, const Tensor& d_gate,
                     const Tensor& d_up);

// y += x
void add(const Tensor& x, const Tensor& y);

}  // namespace winnow::nn
