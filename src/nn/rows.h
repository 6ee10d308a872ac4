// What the functions of nn share: tensors seen as rows, one of two dtypes, sums over rows in a
// fixed order.
#pragma once

#include <algorithm>

#include "base/array.h"
#include "base/check.h"
#include "base/parallel.h"
#include "cpu/rows.h"

namespace winnow::nn {

// The two-dimensional view [rows, width] of a tensor whose leading axes are rows: they must lie one
// inside the other like those of a contiguous tensor. The last axis has stride 1; the row stride is
// free.
Tensor as_rows(const char* operation, const char* name, const Tensor& t);

// f32 or f64, as `other` is.
void check_dtypes(const char* operation, const char* name, const Tensor& t, const char* other_name,
                  const Tensor& other);
// The first tensor of a call: f32 or f64.
void check_real(const char* operation, const char* name, const Tensor& t);

// A matrix [rows, width] that must have the shape and the dtype of `like`, as rows.
Tensor as_rows_like(const char* operation, const char* name, const Tensor& t, const char* like_name,
                    const Tensor& like);
// A contiguous vector [extent].
void check_vector(const char* operation, const char* name, const Tensor& t, std::int64_t extent,
                  const char* layout, DType dtype);

// Calls f with a float or a double: with_real(t.dtype, [&]<class T>(T) {...}).
template <class F>
decltype(auto) with_real(DType dtype, F&& f) {
  if (dtype == DType::kF64) return f(double{});
  return f(float{});
}

template <class T>
T* row(const Tensor& t, std::int64_t i) {
  return t.as<T>() + i * t.strides[0];
}

// The f32 loops of the best instruction set that may be used.
const RowFunctions& row_functions();

// sum_j term(j), in double, as eight sums over j mod 8 that are then added in a fixed tree: the
// compiler makes vectors of it, and the order does not depend on them.
template <class Term>
double sum_in_lanes(std::int64_t n, Term&& term) {
  double lanes[8] = {};
  std::int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    for (std::int64_t lane = 0; lane < 8; ++lane) lanes[lane] += term(j + lane);
  }
  for (; j < n; ++j) lanes[j % 8] += term(j);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

// Rows of one task. A constant: the split of the work, and with it every sum, never depends on the
// number of threads.
inline constexpr std::int64_t kTaskRows = 64;

// body(i) for every row.
template <class Body>
void for_rows(std::int64_t rows, Body&& body) {
  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int) {
    const std::int64_t end = std::min(rows, (task + 1) * kTaskRows);
    for (std::int64_t i = task * kTaskRows; i < end; ++i) body(i);
  });
}

// Sums over rows: body(i, sums) adds row i to `sums` [width] of its block of 64 rows, in double;
// then the blocks' sums are added to `total`, the first block first.
template <class T, class Body>
void sum_over_rows(std::int64_t rows, std::int64_t width, T* total, Body&& body) {
  static thread_local Scratch scratch;  // grows to the largest call of this thread
  const std::int64_t blocks = ceil_div(rows, kTaskRows);
  auto* sums = static_cast<double*>(
      scratch.get(blocks * width * static_cast<std::int64_t>(sizeof(double))).data);
  parallel_for(blocks, [&](std::int64_t block, int) {
    double* own = sums + block * width;
    std::fill(own, own + width, 0.0);
    const std::int64_t end = std::min(rows, (block + 1) * kTaskRows);
    for (std::int64_t i = block * kTaskRows; i < end; ++i) body(i, own);
  });
  for (std::int64_t j = 0; j < width; ++j) {
    double sum = 0;
    for (std::int64_t block = 0; block < blocks; ++block) sum += sums[block * width + j];
    total[j] = static_cast<T>(total[j] + sum);
  }
}

}  // namespace winnow::nn
