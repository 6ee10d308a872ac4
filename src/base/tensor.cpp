#include "winnow/tensor.h"

#include <utility>

#include "base/check.h"

namespace winnow {

std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64: return 8;
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kBF16:
    case DType::kF16: return 2;
    case DType::kU8:
    case DType::kE4M3:
    case DType::kE8M0: return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF64: return "f64";
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kI64: return "i64";
    case DType::kI32: return "i32";
    case DType::kU8: return "u8";
    case DType::kE4M3: return "e4m3";
    case DType::kE8M0: return "e8m0";
  }
  return "?";
}

std::int64_t Tensor::elements() const {
  if (rank == 0) return 0;
  std::int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= shape[i];
  return n;
}

bool Tensor::contiguous() const {
  std::int64_t expected = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

Tensor Tensor::rows(std::int64_t first, std::int64_t count) const {
  WINNOW_CHECK("tensor", rank > 0 && first >= 0 && count >= 0 && first + count <= shape[0],
               "rows [{}, {}) must lie in the first axis of {} rows", first, first + count,
               shape[0]);
  Tensor view = *this;
  view.data = static_cast<char*>(data) + first * strides[0] * dtype_bytes(dtype);
  view.shape[0] = count;
  return view;
}

Tensor Tensor::channels(std::int64_t first, std::int64_t count) const {
  const int last = rank - 1;
  WINNOW_CHECK("tensor", rank > 0 && first >= 0 && count >= 0 && first + count <= shape[last],
               "channels [{}, {}) must lie in the last axis", first, first + count);
  Tensor view = *this;
  view.data = static_cast<char*>(data) + first * strides[last] * dtype_bytes(dtype);
  view.shape[last] = count;
  return view;
}

Tensor Tensor::transposed() const {
  WINNOW_CHECK("tensor", rank == 2, "transposed needs 2 axes, got {}", rank);
  Tensor view = *this;
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.strides[0], view.strides[1]);
  return view;
}

Tensor Tensor::reshape(std::initializer_list<std::int64_t> new_shape) const {
  Tensor view = make_tensor(data, dtype, new_shape);
  view.device = device;
  WINNOW_CHECK("tensor", contiguous() && view.elements() == elements(),
               "a reshape needs contiguous data and as many elements, got {} for {}",
               view.elements(), elements());
  return view;
}

Tensor make_tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                   Device device) {
  WINNOW_CHECK("tensor", shape.size() <= kMaxRank, "rank must be at most {}, got {}", kMaxRank,
               shape.size());
  Tensor t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.device = device;
  t.rank = static_cast<int>(shape.size());
  int axis = 0;
  for (std::int64_t extent : shape) t.shape[axis++] = extent;
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

}  // namespace winnow
