// Memory and order on a GPU, for tests, benchmarks and programs; operations allocate nothing and
// wait for nothing. In a build without CUDA everything here throws kUnsupported.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "base/refusal.h"
#include "winnow/device.h"

namespace winnow {

// Whether code for the compute capability of `implementation` ("cuda.portable", "cuda.sm90") runs
// on the device; for other implementations, whether the device is a CPU.
Refusal refuse_device(std::string_view implementation, Device device);

// Makes a device the current one of this thread while it lives; nothing for the CPU.
class DeviceScope {
 public:
  explicit DeviceScope(Device device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device device, std::int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(other.device_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  Device device_;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Copies between a device and the host; they return when the copy is done.
void copy_to_device(Device device, void* to, const void* from, std::int64_t bytes);
void copy_to_host(Device device, void* to, const void* from, std::int64_t bytes);
// Waits for all that is queued on a device; throws what went wrong there.
void synchronise(Device device);

// Times what is queued on a stream between start and stop.
class DeviceTimer {
 public:
  explicit DeviceTimer(Device device);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;
  void start(Stream stream);
  double stop_ms(Stream stream);  // waits

 private:
  Device device_;
  void *first_ = nullptr, *last_ = nullptr;
};

}  // namespace winnow
