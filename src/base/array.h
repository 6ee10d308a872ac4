// An owned, 64-byte aligned CPU tensor, and scratch memory that grows to the largest call.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>

#include "base/numbers.h"
#include "winnow/tensor.h"

namespace winnow {

struct FreeDelete {
  void operator()(void* p) const;
};

// Contiguous memory with its view. Movable, not copyable; `clone` copies.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::initializer_list<std::int64_t> shape);  // zeros
  Array clone() const;

  const Tensor& view() const { return view_; }
  // NOLINTNEXTLINE(google-explicit-constructor): an array is its view wherever one is asked for
  operator const Tensor&() const { return view_; }
  template <class T>
  T* as() const {
    return view_.as<T>();
  }
  std::int64_t elements() const { return view_.elements(); }
  std::int64_t bytes() const { return elements() * dtype_bytes(view_.dtype); }
  bool empty() const { return view_.empty(); }
  void zero();

 private:
  std::unique_ptr<void, FreeDelete> memory_;
  Tensor view_;
};

// Grows, never shrinks; its content does not survive a larger request.
class Scratch {
 public:
  Workspace get(std::int64_t bytes);

 private:
  std::unique_ptr<void, FreeDelete> memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace winnow
