#include "bench/guarded.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/text.h"

namespace winnow::bench {
namespace {

// Sizes come from the text of a problem: they may be more than any memory. Bytes of a few such tensors
// can be added up.
void check_sizes(std::span<const std::int64_t> shape) {
  constexpr std::int64_t kMaxElements = std::int64_t{1} << 56;
  std::int64_t elements = 1;
  bool fits = true;
  for (std::int64_t extent : shape) {
    WINNOW_CHECK("problem", extent >= 0, "sizes must not be negative, got {}", extent);
    // An axis of none hides no size: strides are products of the others.
    fits = fits &&
           !__builtin_mul_overflow(elements, std::max<std::int64_t>(1, extent), &elements) &&
           elements <= kMaxElements;
  }
  if (fits) return;
  std::vector<std::string> extents;
  for (std::int64_t extent : shape) extents.push_back(std::to_string(extent));
  fail(Status::kInvalidArgument, "problem", "a tensor must have at most 2^56 elements, got {}",
       choice_text(extents, " by "));
}

thread_local int shapes_only = 0;  // scopes that are open

// All that live, by the first address past their data.
std::mutex alive_mutex;
std::map<const char*, std::int64_t>& alive() {
  static std::map<const char*, std::int64_t> bytes_by_end;
  return bytes_by_end;
}

}  // namespace

ShapesOnly::ShapesOnly() { ++shapes_only; }
ShapesOnly::~ShapesOnly() { --shapes_only; }
bool ShapesOnly::on() { return shapes_only > 0; }

void check_machine_holds(std::int64_t bytes) {
  if (bytes / sysconf(_SC_PAGESIZE) >= sysconf(_SC_PHYS_PAGES)) throw std::bad_alloc();
}

Guarded::Memory Guarded::memory_of(const void* address) {
  const std::scoped_lock lock(alive_mutex);
  const auto* at = static_cast<const char*>(address);
  const auto it = alive().upper_bound(at);
  WINNOW_CHECK("problem", it != alive().end() && it->first - it->second <= at,
               "a tensor on a device must be a copy of guarded memory, got other memory");
  return {const_cast<char*>(it->first) - it->second, it->second};
}

bool Guarded::lives(const Memory& memory) {
  const std::scoped_lock lock(alive_mutex);
  const auto it = alive().find(static_cast<const char*>(memory.data) + memory.bytes);
  return it != alive().end() && it->second == memory.bytes;
}

Guarded::Guarded(DType dtype, std::span<const std::int64_t> shape) {
  check_sizes(shape);
  WINNOW_CHECK("problem", shape.size() <= kMaxRank, "a tensor has at most {} axes, got {}",
               kMaxRank, shape.size());
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int axis = view_.rank - 1; axis >= 0; --axis) {
    view_.shape[axis] = shape[static_cast<std::size_t>(axis)];
    view_.strides[axis] = stride;
    stride *= view_.shape[axis];
  }
  if (ShapesOnly::on()) return;
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  const std::int64_t bytes = view_.elements() * dtype_bytes(dtype);
  check_machine_holds(bytes);
  const std::int64_t inner = (bytes + page - 1) / page * page;
  mapped_bytes_ = inner + 2 * page;
  mapping_ = mmap(nullptr, static_cast<std::size_t>(mapped_bytes_), PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  char* first = static_cast<char*>(mapping_) + page;
  if (inner > 0 && mprotect(first, static_cast<std::size_t>(inner), PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
    throw std::bad_alloc();
  }
  view_.data = first + inner - bytes;
  const std::scoped_lock lock(alive_mutex);
  if (bytes > 0) alive()[first + inner] = bytes;
}

Guarded::~Guarded() {
  if (mapping_ == nullptr) return;
  {
    const std::scoped_lock lock(alive_mutex);
    alive().erase(view_.as<char>() + view_.elements() * dtype_bytes(view_.dtype));
  }
  munmap(mapping_, static_cast<std::size_t>(mapped_bytes_));
}

Guarded::Guarded(Guarded&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_bytes_(other.mapped_bytes_),
      view_(std::exchange(other.view_, {})) {}

Guarded& Guarded::operator=(Guarded&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(view_, other.view_);
  return *this;
}

}  // namespace winnow::bench
