// Memory that passes use again and again: it grows to the largest request and is seen in the shape
// of the latest one. Content does not survive growth.
#pragma once

#include "base/array.h"

namespace winnow::attention {

class Buffer {
 public:
  const Tensor& fit(DType dtype, std::initializer_list<std::int64_t> shape) {
    view_ = make_tensor(memory_.view().data, dtype, shape);
    const std::int64_t bytes = view_.elements() * dtype_bytes(dtype);
    if (memory_.empty() || memory_.bytes() < bytes) memory_ = Array(DType::kU8, {bytes});
    view_.data = memory_.view().data;
    return view_;
  }
  const Tensor& view() const { return view_; }
  // NOLINTNEXTLINE(google-explicit-constructor): as Array
  operator const Tensor&() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }

 private:
  Array memory_;
  Tensor view_;
};

}  // namespace winnow::attention
