#include "attention/views.h"

#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace winnow::attention {

Tensor head(const Tensor& t, std::int64_t h) {
  Tensor view = t;
  view.rank = 2;
  view.shape = {t.shape[0], t.shape[2]};
  view.strides = {t.strides[0], t.strides[2]};
  view.data = static_cast<char*>(t.data) + h * t.strides[1] * dtype_bytes(t.dtype);
  return view;
}

Tensor join_heads(const Tensor& t) { return t.reshape({t.shape[0], t.shape[1] * t.shape[2]}); }

Tensor as_one_head(const Tensor& t) {
  Tensor view = t;
  view.rank = 3;
  view.shape = {t.shape[0], 1, t.shape[1]};
  view.strides = {t.strides[0], t.shape[1] * t.strides[1], t.strides[1]};
  return view;
}

void copy(const Tensor& from, const Tensor& to) {
  constexpr std::int64_t kRowsPerTask = 64;
  const std::int64_t rows = from.shape[0], size = dtype_bytes(from.dtype);
  const auto bytes = static_cast<std::size_t>(from.shape[2] * size);
  if (bytes == 0) return;
  parallel_for(ceil_div(rows, kRowsPerTask), [&](std::int64_t task, int) {
    const std::int64_t last = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t i = task * kRowsPerTask; i < last; ++i) {
      for (std::int64_t h = 0; h < from.shape[1]; ++h) {
        std::memcpy(to.as<char>() + (i * to.strides[0] + h * to.strides[1]) * size,
                    from.as<char>() + (i * from.strides[0] + h * from.strides[1]) * size, bytes);
      }
    }
  });
}

void scale(const Tensor& t, double factor) {
  const std::int64_t n = t.elements();
  if (t.dtype == DType::kF64) {
    for (std::int64_t i = 0; i < n; ++i) t.as<double>()[i] *= factor;
  } else {
    const auto f = static_cast<float>(factor);
    for (std::int64_t i = 0; i < n; ++i) t.as<float>()[i] *= f;
  }
}

}  // namespace winnow::attention
