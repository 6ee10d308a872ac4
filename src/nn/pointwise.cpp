#include "nn/pointwise.h"

#include <cmath>

#include "nn/rows.h"

namespace winnow::nn {
namespace {

void swiglu_row(const float* gate, const float* up, float* y, std::int64_t n) {
  row_functions().swiglu(gate, up, y, n);
}
void swiglu_row(const double* gate, const double* up, double* y, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) y[j] = gate[j] / (1 + std::exp(-gate[j])) * up[j];
}

void swiglu_backward_row(const float* gate, const float* up, const float* d_y, float* d_gate,
                         float* d_up, std::int64_t n) {
  row_functions().swiglu_backward(gate, up, d_y, d_gate, d_up, n);
}
void swiglu_backward_row(const double* gate, const double* up, const double* d_y, double* d_gate,
                         double* d_up, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) {
    const double x = gate[j], u = up[j], d = d_y[j], s = 1 / (1 + std::exp(-x));
    d_gate[j] = d * u * s * (1 + x * (1 - s));
    d_up[j] = d * x * s;
  }
}

}  // namespace

void swiglu(const Tensor& gate, const Tensor& up, const Tensor& y) {
  constexpr char kName[] = "swiglu";
  check_real(kName, "gate", gate);
  const Tensor g = as_rows(kName, "gate", gate);
  const Tensor u = as_rows_like(kName, "up", up, "gate", gate);
  const Tensor out = as_rows_like(kName, "y", y, "gate", gate);
  with_real(gate.dtype, [&]<class T>(T) {
    for_rows(g.shape[0], [&](std::int64_t i) {
      swiglu_row(row<T>(g, i), row<T>(u, i), row<T>(out, i), g.shape[1]);
    });
  });
}

void swiglu_backward(const Tensor& gate, const Tensor& up, const Tensor& d_y, const Tensor& d_gate,
                     const Tensor& d_up) {
  constexpr char kName[] = "swiglu_backward";
  check_real(kName, "gate", gate);
  const Tensor g = as_rows(kName, "gate", gate);
  const Tensor u = as_rows_like(kName, "up", up, "gate", gate);
  const Tensor d = as_rows_like(kName, "d_y", d_y, "gate", gate);
  const Tensor dg = as_rows_like(kName, "d_gate", d_gate, "gate", gate);
  const Tensor du = as_rows_like(kName, "d_up", d_up, "gate", gate);
  with_real(gate.dtype, [&]<class T>(T) {
    for_rows(g.shape[0], [&](std::int64_t i) {
      swiglu_backward_row(row<T>(g, i), row<T>(u, i), row<T>(d, i), row<T>(dg, i), row<T>(du, i),
                          g.shape[1]);
    });
  });
}

void add(const Tensor& x, const Tensor& y) {
  constexpr char kName[] = "add";
  check_real(kName, "x", x);
  const Tensor from = as_rows(kName, "x", x), to = as_rows_like(kName, "y", y, "x", x);
  with_real(x.dtype, [&]<class T>(T) {
    for_rows(from.shape[0], [&](std::int64_t i) {
      const T* a = row<T>(from, i);
      T* b = row<T>(to, i);
      for (std::int64_t j = 0; j < from.shape[1]; ++j) b[j] += a[j];
    });
  });
}

}  // namespace winnow::nn
