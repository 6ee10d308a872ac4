// Problems on a GPU. Cases are built, poisoned and compared in host memory; while a Placement
// lives, `placed(args)` gives a call the same tensors on its device, `brought(args)` what they hold as
// well, and `download` brings back what the call wrote.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "base/device.h"
#include "ops/tensors.h"

namespace winnow::bench {

// Poisoned memory of a device between two fences of poison. Aligned to 256 bytes.
class FencedMemory {
 public:
  FencedMemory() = default;
  FencedMemory(Device device, std::int64_t bytes);
  void* data() const;
  std::int64_t bytes() const { return bytes_; }
  void check() const;  // throws where a fence was written

 private:
  Device device_;
  std::int64_t bytes_ = 0;
  DeviceMemory memory_;
};

// One at a time on a thread.
class Placement {
 public:
  explicit Placement(Device device);
  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  static Placement* current();  // null: problems run on the CPU

  Device device() const { return device_; }
  // The tensor where it lies on the device, in the twin of the Guarded memory that holds it.
  Tensor twin(const Tensor& host);
  // Every twin gets what the host holds, unless uploads are off: a benchmark repeats one call. Here
  // and in `download`, twins of memory that is gone go too.
  void upload();
  void set_uploads(bool on) { uploads_ = on; }
  // The host gets what the device holds, when all is done there. Throws where the device wrote
  // outside a tensor's memory.
  void download();

 private:
  struct Twin {
    void* host = nullptr;
    FencedMemory memory;
  };
  void drop_dead_twins();

  Device device_;
  bool uploads_ = true;
  std::map<const void*, Twin> twins_;  // by host address
};

// For the CPU none.
inline std::optional<Placement> place(Device device) {
  return device.kind == Device::Kind::kCpu ? std::optional<Placement>()
                                           : std::optional<Placement>(std::in_place, device);
}

// One call on the device that problems run on, with a poisoned workspace of exactly so many bytes.
// When it returns, the host holds what the call wrote.
void run_once(std::int64_t workspace_bytes, const std::function<void(Workspace)>& call);

template <class Args>
Args placed(const Args& args) {
  Placement* placement = Placement::current();
  if (placement == nullptr) return args;
  Args there = args;
  auto move = [&](const auto& tensors) {
    // The list refers to the members of `there`, which are ours to change.
    for (const ops::Named& t : tensors) const_cast<Tensor&>(t.tensor) = placement->twin(t.tensor);
  };
  move(ops::inputs_of(there));
  move(ops::outputs_of(there));
  return there;
}

// For a run.
template <class Args>
Args brought(const Args& args) {
  const Args there = placed(args);
  if (Placement* placement = Placement::current()) placement->upload();
  return there;
}

// The device that problems run on now.
inline Device current_device() {
  return Placement::current() == nullptr ? Device{} : Placement::current()->device();
}

}  // namespace winnow::bench
