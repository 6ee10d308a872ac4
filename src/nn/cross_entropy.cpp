#include "nn/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "nn/rows.h"

namespace winnow::nn {
namespace {

float maximum(const float* x, std::int64_t n) { return row_functions().maximum(x, n); }
double maximum(const double* x, std::int64_t n) { return *std::max_element(x, x + n); }

// sum_j exp(x[j] - top), in double; the terms are kept in `terms` unless that is null.
double sum_of_exp(const float* x, float top, float* terms, std::int64_t n) {
  return row_functions().sum_of_exp(x, top, terms, n);
}
double sum_of_exp(const double* x, double top, double* terms, std::int64_t n) {
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const double e = std::exp(x[j] - top);
    if (terms != nullptr) terms[j] = e;
    sum += e;
  }
  return sum;
}

}  // namespace

void cross_entropy(const Tensor& logits, std::span<const std::int32_t> targets, const Tensor& nll,
                   const Tensor& d_logits, double d_nll) {
  constexpr char kName[] = "cross_entropy";
  check_real(kName, "logits", logits);
  WINNOW_CHECK(kName, logits.rank == 2 && logits.shape[1] >= 1,
               "logits must be [rows, vocab] with vocab >= 1, got {}", shape_text(logits));
  check_unit_stride(kName, "logits", logits);
  const std::int64_t rows = logits.shape[0], vocab = logits.shape[1];
  check_vector(kName, "nll", nll, rows, "[rows]", logits.dtype);
  const bool backward = !d_logits.empty();
  if (backward) as_rows_like(kName, "d_logits", d_logits, "logits", logits);
  WINNOW_CHECK(kName, std::ssize(targets) == rows, "targets must be [rows = {}], got [{}]", rows,
               targets.size());
  for (const std::int32_t target : targets) {
    WINNOW_CHECK(kName, target >= -1 && target < vocab,
                 "targets must be -1 or a token from 0 to {}, got {}", vocab - 1, target);
  }
  with_real(logits.dtype, [&]<class T>(T) {
    for_rows(rows, [&](std::int64_t i) {
      const T* x = row<T>(logits, i);
      T* d = backward ? row<T>(d_logits, i) : nullptr;
      const std::int32_t target = targets[static_cast<std::size_t>(i)];
      if (target < 0) {
        nll.as<T>()[i] = 0;
        if (backward) std::fill_n(d, vocab, T(0));
        return;
      }
      const T top = maximum(x, vocab);
      const double of_target = static_cast<double>(x[target]) - static_cast<double>(top);
      const double sum = sum_of_exp(x, top, d, vocab);  // may overwrite the logits
      nll.as<T>()[i] = static_cast<T>(std::log(sum) - of_target);
      if (!backward) return;
      const auto scale = static_cast<T>(d_nll / sum);
      for (std::int64_t j = 0; j < vocab; ++j) d[j] *= scale;
      d[target] = static_cast<T>((std::exp(of_target) / sum - 1) * d_nll);
    });
  });
}

void log_softmax(const Tensor& logits, const Tensor& log_probabilities) {
  constexpr char kName[] = "log_softmax";
  check_real(kName, "logits", logits);
  const Tensor x = as_rows(kName, "logits", logits);
  const Tensor y = as_rows_like(kName, "log_probabilities", log_probabilities, "logits", logits);
  WINNOW_CHECK(kName, x.shape[1] >= 1, "logits must have a last axis of at least 1, got {}",
               x.shape[1]);
  with_real(logits.dtype, [&]<class T>(T) {
    for_rows(x.shape[0], [&](std::int64_t i) {
      const T* from = row<T>(x, i);
      T* to = row<T>(y, i);
      const T top = maximum(from, x.shape[1]);
      const double log_sum = std::log(sum_of_exp(from, top, static_cast<T*>(nullptr), x.shape[1]));
      for (std::int64_t j = 0; j < x.shape[1]; ++j) {
        to[j] = static_cast<T>(static_cast<double>(from[j]) - static_cast<double>(top) - log_sum);
      }
    });
  });
}

}  // namespace winnow::nn
