#include "comm/group_memory.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"

namespace winnow::comm {
namespace {

constexpr std::int64_t kTaskElements = std::int64_t{1} << 15;

template <class T>
void add(const T* data, std::int64_t parts, std::int64_t count, T* sums) {
  parallel_for(ceil_div(count, kTaskElements), [&](std::int64_t task, int) {
    const std::int64_t first = task * kTaskElements;
    const std::int64_t n = std::min(kTaskElements, count - first);
    T* const sum = sums + first;
    if (sum != data + first) std::copy_n(data + first, n, sum);
    for (std::int64_t r = 1; r < parts; ++r) {
      const T* const part = data + r * count + first;
      for (std::int64_t i = 0; i < n; ++i) sum[i] += part[i];
    }
  });
}

class HostMemory final : public GroupMemory {
 public:
  std::byte* allocate(std::int64_t bytes) override {
    return memory_.emplace_back(new std::byte[static_cast<std::size_t>(bytes)]).get();
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void zero(std::byte* data, std::int64_t bytes) override {
    std::memset(data, 0, static_cast<std::size_t>(bytes));
  }
  void add_parts(DType dtype, const std::byte* data, std::int64_t parts, std::int64_t count,
                 std::byte* sums) override {
    if (dtype == DType::kF32) {
      add(reinterpret_cast<const float*>(data), parts, count, reinterpret_cast<float*>(sums));
    } else {
      add(reinterpret_cast<const double*>(data), parts, count, reinterpret_cast<double*>(sums));
    }
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

}  // namespace

std::unique_ptr<GroupMemory> memory_of(const Communicator& group) {
  if (group.device().kind == Device::Kind::kCpu) return std::make_unique<HostMemory>();
#if defined(WINNOW_CUDA)
  return gpu_memory(group.device(), group.stream());
#else
  fail(Status::kUnsupported, "sum", "a group on {} needs a build with CUDA",
       device_text(group.device()));
#endif
}

}  // namespace winnow::comm
