#include "base/array.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace winnow {
namespace {

void* allocate(std::int64_t bytes) {
  const auto rounded = (static_cast<std::size_t>(bytes) + 127) / 64 * 64;
  void* p = std::aligned_alloc(64, rounded);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void FreeDelete::operator()(void* p) const { std::free(p); }

Array::Array(DType dtype, std::initializer_list<std::int64_t> shape)
    : view_(make_tensor(nullptr, dtype, shape)) {
  memory_.reset(allocate(bytes()));
  view_.data = memory_.get();
  zero();
}

Array Array::clone() const {
  Array copy;
  copy.view_ = view_;
  copy.memory_.reset(allocate(bytes()));
  copy.view_.data = copy.memory_.get();
  if (bytes() > 0) std::memcpy(copy.view_.data, view_.data, static_cast<std::size_t>(bytes()));
  return copy;
}

void Array::zero() {
  if (bytes() > 0) std::memset(view_.data, 0, static_cast<std::size_t>(bytes()));
}

Workspace Scratch::get(std::int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    memory_.reset(allocate(bytes));
    bytes_ = bytes;
  }
  return {memory_.get(), bytes_};
}

}  // namespace winnow
