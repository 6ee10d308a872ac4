#include "nn/norm.h"

#include <cmath>

#include "nn/rows.h"

namespace winnow::nn {
namespace {

// The arguments of one norm's backward as rows; `mean` is left out for RMSNorm.
struct Backward {
  Tensor x, weight, mean, scale, d_y, d_x, d_weight, d_bias;
  bool accumulate_x;
};

// With g = d_y * weight and x^ = (x - mean) * scale:
//   d_x = scale * (g - mean(g) - x^ mean(g x^)),  without mean(g) for RMSNorm.
template <class T>
void d_input(const Backward& a, std::int64_t i) {
  const std::int64_t width = a.x.shape[1];
  const T* x = row<T>(a.x, i);
  const T* d_y = row<T>(a.d_y, i);
  const T* weight = a.weight.as<T>();
  T* d_x = row<T>(a.d_x, i);
  const double mean = a.mean.empty() ? 0 : static_cast<double>(a.mean.as<T>()[i]);
  const double scale = a.scale.as<T>()[i];
  auto g = [&](std::int64_t j) {
    return static_cast<double>(d_y[j]) * static_cast<double>(weight[j]);
  };
  const double dot = sum_in_lanes(
      width, [&](std::int64_t j) { return g(j) * (static_cast<double>(x[j]) - mean); });
  const double of_mean =
      a.mean.empty() ? 0 : scale * sum_in_lanes(width, g) / static_cast<double>(width);
  const double of_scale = scale * scale * scale * dot / static_cast<double>(width);
  for (std::int64_t j = 0; j < width; ++j) {
    const double d = scale * g(j) - of_mean - of_scale * (static_cast<double>(x[j]) - mean);
    d_x[j] = static_cast<T>(a.accumulate_x ? static_cast<double>(d_x[j]) + d : d);
  }
}

// Weights first: d_x may lie where d_y lies.
template <class T>
void backward(const Backward& a) {
  const std::int64_t rows = a.x.shape[0], width = a.x.shape[1];
  sum_over_rows(rows, width, a.d_weight.as<T>(), [&](std::int64_t i, double* sums) {
    const T* x = row<T>(a.x, i);
    const T* d_y = row<T>(a.d_y, i);
    const double mean = a.mean.empty() ? 0 : static_cast<double>(a.mean.as<T>()[i]);
    const double scale = a.scale.as<T>()[i];
    for (std::int64_t j = 0; j < width; ++j) {
      sums[j] += static_cast<double>(d_y[j]) * ((static_cast<double>(x[j]) - mean) * scale);
    }
  });
  if (!a.d_bias.empty()) {
    sum_over_rows(rows, width, a.d_bias.as<T>(), [&](std::int64_t i, double* sums) {
      const T* d_y = row<T>(a.d_y, i);
      for (std::int64_t j = 0; j < width; ++j) sums[j] += static_cast<double>(d_y[j]);
    });
  }
  for_rows(rows, [&](std::int64_t i) { d_input<T>(a, i); });
}

Tensor check_input(const char* operation, const Tensor& x, const Tensor& weight) {
  check_real(operation, "x", x);
  const Tensor rows = as_rows(operation, "x", x);
  check_vector(operation, "weight", weight, rows.shape[1], "[width]", x.dtype);
  return rows;
}

}  // namespace

void rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
              const Tensor& scale) {
  constexpr char kName[] = "rms_norm";
  const Tensor in = check_input(kName, x, weight);
  const Tensor out = as_rows_like(kName, "y", y, "x", x);
  check_vector(kName, "scale", scale, in.shape[0], "[rows]", x.dtype);
  const std::int64_t width = in.shape[1];
  with_real(x.dtype, [&]<class T>(T) {
    for_rows(in.shape[0], [&](std::int64_t i) {
      const T* from = row<T>(in, i);
      T* to = row<T>(out, i);
      const double squares = sum_in_lanes(width, [&](std::int64_t j) {
        return static_cast<double>(from[j]) * static_cast<double>(from[j]);
      });
      const auto s = static_cast<T>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
      scale.as<T>()[i] = s;
      for (std::int64_t j = 0; j < width; ++j) to[j] = from[j] * s * weight.as<T>()[j];
    });
  });
}

void rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& scale,
                       const Tensor& d_y, const Tensor& d_x, const Tensor& d_weight,
                       bool accumulate_x) {
  constexpr char kName[] = "rms_norm_backward";
  Backward a;
  a.x = check_input(kName, x, weight);
  a.weight = weight;
  a.scale = scale;
  a.d_y = as_rows_like(kName, "d_y", d_y, "x", x);
  a.d_x = as_rows_like(kName, "d_x", d_x, "x", x);
  a.d_weight = d_weight;
  a.accumulate_x = accumulate_x;
  check_vector(kName, "scale", scale, a.x.shape[0], "[rows]", x.dtype);
  check_vector(kName, "d_weight", d_weight, a.x.shape[1], "[width]", x.dtype);
  with_real(x.dtype, [&]<class T>(T) { backward<T>(a); });
}

void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                const Tensor& y, const Tensor& mean, const Tensor& scale) {
  constexpr char kName[] = "layer_norm";
  const Tensor in = check_input(kName, x, weight);
  const Tensor out = as_rows_like(kName, "y", y, "x", x);
  const std::int64_t width = in.shape[1];
  check_vector(kName, "bias", bias, width, "[width]", x.dtype);
  check_vector(kName, "mean", mean, in.shape[0], "[rows]", x.dtype);
  check_vector(kName, "scale", scale, in.shape[0], "[rows]", x.dtype);
  with_real(x.dtype, [&]<class T>(T) {
    for_rows(in.shape[0], [&](std::int64_t i) {
      const T* from = row<T>(in, i);
      T* to = row<T>(out, i);
      const double sum =
          sum_in_lanes(width, [&](std::int64_t j) { return static_cast<double>(from[j]); });
      const auto m = static_cast<T>(sum / static_cast<double>(width));
      // Around the rounded mean, which the backward uses too.
      const double squares = sum_in_lanes(width, [&](std::int64_t j) {
        const double centred = static_cast<double>(from[j]) - static_cast<double>(m);
        return centred * centred;
      });
      const auto s = static_cast<T>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
      mean.as<T>()[i] = m;
      scale.as<T>()[i] = s;
      for (std::int64_t j = 0; j < width; ++j) {
        to[j] = (from[j] - m) * s * weight.as<T>()[j] + bias.as<T>()[j];
      }
    });
  });
}

void layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& scale, const Tensor& d_y, const Tensor& d_x,
                         const Tensor& d_weight, const Tensor& d_bias, bool accumulate_x) {
  constexpr char kName[] = "layer_norm_backward";
  Backward a;
  a.x = check_input(kName, x, weight);
  a.weight = weight;
  a.mean = mean;
  a.scale = scale;
  a.d_y = as_rows_like(kName, "d_y", d_y, "x", x);
  a.d_x = as_rows_like(kName, "d_x", d_x, "x", x);
  a.d_weight = d_weight;
  a.d_bias = d_bias;
  a.accumulate_x = accumulate_x;
  check_vector(kName, "mean", mean, a.x.shape[0], "[rows]", x.dtype);
  check_vector(kName, "scale", scale, a.x.shape[0], "[rows]", x.dtype);
  check_vector(kName, "d_weight", d_weight, a.x.shape[1], "[width]", x.dtype);
  check_vector(kName, "d_bias", d_bias, a.x.shape[1], "[width]", x.dtype);
  with_real(x.dtype, [&]<class T>(T) { backward<T>(a); });
}

}  // namespace winnow::nn
