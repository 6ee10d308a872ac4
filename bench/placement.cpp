#include "bench/placement.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "bench/guarded.h"

namespace winnow::bench {
namespace {

constexpr std::int64_t kFence = 1024;  // bytes; keeps the alignment of what it fences
constexpr unsigned char kPoison = 0x7f;

thread_local Placement* current_placement = nullptr;

}  // namespace

FencedMemory::FencedMemory(Device device, std::int64_t bytes)
    : device_(device), bytes_(bytes), memory_(device, bytes + 2 * kFence) {
  const std::vector<unsigned char> poison(static_cast<std::size_t>(bytes + 2 * kFence), kPoison);
  copy_to_device(device, memory_.data(), poison.data(), std::ssize(poison));
}
void* FencedMemory::data() const { return static_cast<char*>(memory_.data()) + kFence; }
void FencedMemory::check() const {
  std::vector<unsigned char> fences(static_cast<std::size_t>(2 * kFence));
  copy_to_host(device_, fences.data(), memory_.data(), kFence);
  copy_to_host(device_, fences.data() + kFence, static_cast<char*>(data()) + bytes_, kFence);
  WINNOW_CHECK(
      "problem",
      std::all_of(fences.begin(), fences.end(), [](unsigned char c) { return c == kPoison; }),
      "a kernel must not write outside the {} bytes of a tensor or workspace", bytes_);
}

Placement::Placement(Device device) : device_(device) {
  WINNOW_CHECK("problem", device.kind == Device::Kind::kCuda && cuda_refusal().empty(),
               "needs a GPU, but {}", cuda_refusal());
  WINNOW_CHECK("problem", current_placement == nullptr, "one placement at a time, got a second");
  current_placement = this;
}
Placement::~Placement() { current_placement = nullptr; }
Placement* Placement::current() { return current_placement; }

Tensor Placement::twin(const Tensor& host) {
  Tensor there = host;
  if (host.empty()) return there;
  there.device = device_;
  if (host.data == nullptr || host.elements() == 0) return there;
  const Guarded::Memory memory = Guarded::memory_of(host.data);
  Twin& twin = twins_[memory.data];
  if (twin.memory.bytes() != memory.bytes)
    twin = {memory.data, FencedMemory(device_, memory.bytes)};
  there.data = static_cast<char*>(twin.memory.data()) +
               (static_cast<char*>(host.data) - static_cast<char*>(memory.data));
  return there;
}

void Placement::drop_dead_twins() {
  std::erase_if(twins_, [](const auto& entry) {
    return !Guarded::lives({entry.second.host, entry.second.memory.bytes()});
  });
}

void Placement::upload() {
  if (!uploads_) return;
  drop_dead_twins();
  for (const auto& [host, twin] : twins_)
    copy_to_device(device_, twin.memory.data(), host, twin.memory.bytes());
}

void Placement::download() {
  synchronise(device_);
  drop_dead_twins();
  for (const auto& [host, twin] : twins_) {
    copy_to_host(device_, twin.host, twin.memory.data(), twin.memory.bytes());
    twin.memory.check();
  }
}

void run_once(std::int64_t workspace_bytes, const std::function<void(Workspace)>& call) {
  if (Placement* placement = Placement::current()) {
    const FencedMemory workspace(placement->device(), workspace_bytes);
    call({workspace.data(), workspace_bytes});
    placement->download();
    workspace.check();
    return;
  }
  const Guarded workspace(DType::kU8, {workspace_bytes});
  if (workspace_bytes > 0)
    std::memset(workspace.view().data, kPoison, static_cast<std::size_t>(workspace_bytes));
  call({workspace.view().data, workspace_bytes});
}

}  // namespace winnow::bench
