// Memory between two pages that must not be touched: reading or writing past either end stops the
// program at the very instruction. The data ends at the upper guard, so that an overrun by one
// element is caught.
#pragma once

#include <initializer_list>
#include <span>

#include "winnow/tensor.h"

namespace winnow::bench {

// While one lives, every Guarded that is made on this thread has a shape and no memory: its data is
// null, and all that fills tensors leaves it alone. A case that is made so can be asked (explain,
// workspace_bytes, tensor_bytes) at any size and at once, and nothing else.
class ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;
  static bool on();
};

// Throws std::bad_alloc for more than this machine has: a system that overcommits would grant it and
// end the program later.
void check_machine_holds(std::int64_t bytes);

class Guarded {
 public:
  Guarded() = default;
  Guarded(DType dtype, std::span<const std::int64_t> shape);  // zeros
  Guarded(DType dtype, std::initializer_list<std::int64_t> shape)
      : Guarded(dtype, std::span(shape.begin(), shape.size())) {}
  ~Guarded();
  Guarded(Guarded&& other) noexcept;
  Guarded& operator=(Guarded&& other) noexcept;

  // The whole memory of the Guarded that holds an address; throws where none does.
  struct Memory {
    void* data = nullptr;
    std::int64_t bytes = 0;
  };
  static Memory memory_of(const void* address);
  static bool lives(const Memory& memory);  // whether a Guarded has this very memory

  const Tensor& view() const { return view_; }
  operator const Tensor&() const { return view_; }  // NOLINT: as base/array.h

 private:
  void* mapping_ = nullptr;
  std::int64_t mapped_bytes_ = 0;
  Tensor view_;
};

}  // namespace winnow::bench
