// Arrays out of a workspace, each aligned to 256 bytes; a workspace itself needs no alignment.
#pragma once

#include <cstdint>

namespace winnow::cuda {

class Carve {
 public:
  // Null memory: only to count.
  explicit Carve(void* memory)
      : base_((reinterpret_cast<std::uintptr_t>(memory) + 255) / 256 * 256) {}
  template <class T>
  T* take(std::int64_t elements) {
    T* p = base_ == 0 ? nullptr : reinterpret_cast<T*>(base_ + static_cast<std::uintptr_t>(used_));
    used_ += (elements * static_cast<std::int64_t>(sizeof(T)) + 255) / 256 * 256;
    return p;
  }
  std::int64_t bytes_to_ask() const { return used_ == 0 ? 0 : used_ + 255; }

 private:
  std::uintptr_t base_;
  std::int64_t used_ = 0;
};

}  // namespace winnow::cuda
