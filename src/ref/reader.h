// Element access for the references: any floating dtype, any strides, in double.
#pragma once

#include "base/numbers.h"
#include "base/row_range.h"
#include "winnow/tensor.h"

namespace winnow::ref {

inline double get(const Tensor& t, std::int64_t i) {
  return load_double(t.data, t.dtype, i * t.strides[0]);
}
inline double get(const Tensor& t, std::int64_t i, std::int64_t j) {
  return load_double(t.data, t.dtype, i * t.strides[0] + j * t.strides[1]);
}
inline double get(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k) {
  return load_double(t.data, t.dtype, i * t.strides[0] + j * t.strides[1] + k * t.strides[2]);
}
inline double get(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k, std::int64_t l) {
  return load_double(t.data, t.dtype,
                     i * t.strides[0] + j * t.strides[1] + k * t.strides[2] + l * t.strides[3]);
}
inline void set(const Tensor& t, std::int64_t i, double x) {
  store_double(t.data, t.dtype, i * t.strides[0], x);
}
inline void set(const Tensor& t, std::int64_t i, std::int64_t j, double x) {
  store_double(t.data, t.dtype, i * t.strides[0] + j * t.strides[1], x);
}
inline void set(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k, double x) {
  store_double(t.data, t.dtype, i * t.strides[0] + j * t.strides[1] + k * t.strides[2], x);
}
inline std::int32_t get_id(const Tensor& t, std::int64_t i, std::int64_t j) {
  return t.as<std::int32_t>()[i * t.strides[0] + j * t.strides[1]];
}

}  // namespace winnow::ref
