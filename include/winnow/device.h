// The GPUs of this machine, as far as this build can use them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow {

struct CudaDevice {
  std::string name;          // "NVIDIA H200"
  int major = 0, minor = 0;  // compute capability
  int processors = 0;        // streaming multiprocessors
  std::int64_t memory_bytes = 0;
};

// Device{kCuda, i} is the i-th. Empty where there is none; `cuda_refusal` then says why.
const std::vector<CudaDevice>& cuda_devices();

// Why no GPU can be used: "not built", the driver's words, ...; "" where there is one.
const std::string& cuda_refusal();

// Loads every kernel of the library onto a GPU. Afterwards no call loads code or takes device
// memory for it. Throws where the device does not exist.
void warmup(Device device);

}  // namespace winnow
