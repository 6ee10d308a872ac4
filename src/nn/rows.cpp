#include "nn/rows.h"

#include "base/cpu_features.h"

namespace winnow::nn {

Tensor as_rows(const char* operation, const char* name, const Tensor& t) {
  WINNOW_CHECK(operation, t.rank >= 1, "{} must be [rows, width], got nothing", name);
  check_host(operation, name, t);
  check_unit_stride(operation, name, t);
  Tensor rows = t;
  rows.rank = 2;
  if (t.rank == 1) {
    rows.shape = {1, t.shape[0]};
    rows.strides = {t.shape[0], 1};
    return rows;
  }
  rows.shape = {1, t.shape[static_cast<std::size_t>(t.rank - 1)]};
  rows.strides = {t.strides[static_cast<std::size_t>(t.rank - 2)], 1};
  for (auto axis = static_cast<std::size_t>(t.rank - 1); axis-- > 0;) {
    WINNOW_CHECK(operation,
                 t.shape[axis] <= 1 || rows.shape[0] <= 1 ||
                     t.strides[axis] == rows.shape[0] * rows.strides[0],
                 "the leading axes of {} must lie one inside the other; axis {} has stride {}, "
                 "expected {}",
                 name, axis, t.strides[axis], rows.shape[0] * rows.strides[0]);
    if (rows.shape[0] <= 1 && t.shape[axis] > 1) rows.strides[0] = t.strides[axis];
    rows.shape[0] *= t.shape[axis];
  }
  return rows;
}

void check_real(const char* operation, const char* name, const Tensor& t) {
  check_dtype(operation, name, t, {DType::kF32, DType::kF64});
}

void check_dtypes(const char* operation, const char* name, const Tensor& t, const char* other_name,
                  const Tensor& other) {
  WINNOW_CHECK(operation, t.dtype == other.dtype, "{} must be {} as {}, got {}", name,
               dtype_name(other.dtype), other_name, dtype_name(t.dtype));
}

Tensor as_rows_like(const char* operation, const char* name, const Tensor& t, const char* like_name,
                    const Tensor& like) {
  check_dtypes(operation, name, t, like_name, like);
  bool same = t.rank == like.rank;
  for (int axis = 0; same && axis < t.rank; ++axis) {
    same = t.shape[static_cast<std::size_t>(axis)] == like.shape[static_cast<std::size_t>(axis)];
  }
  WINNOW_CHECK(operation, same, "{} must have the shape of {}, {}, got {}", name, like_name,
               shape_text(like), shape_text(t));
  return as_rows(operation, name, t);
}

void check_vector(const char* operation, const char* name, const Tensor& t, std::int64_t extent,
                  const char* layout, DType dtype) {
  check_host(operation, name, t);
  check_shape(operation, name, t, {extent}, layout);
  check_unit_stride(operation, name, t);
  check_dtype(operation, name, t, {dtype});
}

const RowFunctions& row_functions() {
#if defined(WINNOW_X86)
  static const bool avx2 = refuse_instruction_set("avx2").empty();
  if (avx2) return cpu::avx2::row_functions;
#endif
  return cpu::portable::row_functions;
}

}  // namespace winnow::nn
