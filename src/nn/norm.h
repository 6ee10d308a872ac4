// RMSNorm and LayerNorm over the last axis, f32 or f64, with statistics in double.
#pragma once

#include "winnow/tensor.h"

namespace winnow::nn {

// y = x / sqrt(mean(x^2) + eps) * weight.  x, y [rows, width]; weight [width]; scale [rows] keeps
// 1 / sqrt(...) for the backward.
void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
              const Tensor& scale);
// d_x is overwritten, or added to; d_weight is added to, over the rows in a fixed order.
void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& scale,
                       const Tensor& d_y, const Tensor& d_x, const Tensor& d_weight,
                       bool accumulate_x = false);

// y = (x - mean) / sqrt(variance + eps) * weight + bias.  mean, scale [rows].
void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                const Tensor& y, const Tensor& mean, const Tensor& scale);
void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& scale, const Tensor& d_y, const Tensor& d_x,
                         const Tensor& d_weight, const Tensor& d_bias, bool accumulate_x = false);

}  // namespace winnow::nn
