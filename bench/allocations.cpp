// The program's operator new and delete, on malloc.
#include "bench/allocations.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::int64_t> count{0};

void* allocate(std::size_t bytes) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(std::max<std::size_t>(1, bytes));
}
void* allocate(std::size_t bytes, std::align_val_t alignment) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  const auto unit = static_cast<std::size_t>(alignment);
  const std::size_t units = std::max<std::size_t>(1, bytes / unit + (bytes % unit != 0 ? 1 : 0));
  return units > SIZE_MAX / unit ? nullptr : std::aligned_alloc(unit, units * unit);
}
void* or_throw(void* p) {
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

std::int64_t winnow::bench::allocations() { return count.load(std::memory_order_relaxed); }

// Every form, so that no pair comes from two libraries (a sanitizer's among them). Delete is out of
// line: GCC 12 would take its free for a mismatch with new.
#define WINNOW_OUT_OF_LINE __attribute__((noinline))
using Size = std::size_t;
using Align = std::align_val_t;
using NoThrow = const std::nothrow_t&;

void* operator new(Size n) { return or_throw(allocate(n)); }
void* operator new[](Size n) { return or_throw(allocate(n)); }
void* operator new(Size n, NoThrow) noexcept { return allocate(n); }
void* operator new[](Size n, NoThrow) noexcept { return allocate(n); }
void* operator new(Size n, Align a) { return or_throw(allocate(n, a)); }
void* operator new[](Size n, Align a) { return or_throw(allocate(n, a)); }
void* operator new(Size n, Align a, NoThrow) noexcept { return allocate(n, a); }
void* operator new[](Size n, Align a, NoThrow) noexcept { return allocate(n, a); }
WINNOW_OUT_OF_LINE void operator delete(void* p) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete(void* p, Size) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p, Size) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete(void* p, NoThrow) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p, NoThrow) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete(void* p, Align) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p, Align) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete(void* p, Size, Align) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p, Size, Align) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete(void* p, Align, NoThrow) noexcept { std::free(p); }
WINNOW_OUT_OF_LINE void operator delete[](void* p, Align, NoThrow) noexcept { std::free(p); }
