// Kernels as objects: a launch prepares its kernel once per device (loads its code, raises its
// limit of dynamic shared memory), checks for errors and queues it. All kernels of the library
// stand in one list, so that `warmup` can prepare them before a graph is captured or memory is
// counted.
//
//   const Kernel kFill{fill_kernel};
//   kFill.launch("hadamard", {.grid = rows, .block = 256, .stream = stream}, data, rows);
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "winnow/tensor.h"

namespace winnow::cuda {

inline cudaStream_t stream_of(Workspace workspace) {
  return static_cast<cudaStream_t>(workspace.stream.handle);
}

struct Launch {
  dim3 grid{1}, block{1};
  std::int64_t shared_bytes = 0;  // dynamic
  unsigned cluster = 1;           // blocks of a cluster, along x
  cudaStream_t stream = nullptr;
};

// What does not depend on the parameters.
class AnyKernel {
 public:
  // Kernels live as long as the program.
  AnyKernel(const void* function, std::int64_t most_shared_bytes, bool large_cluster);
  AnyKernel(const AnyKernel&) = delete;
  AnyKernel& operator=(const AnyKernel&) = delete;

  // On the current device. Throws kDevice, as the launch does.
  void prepare(const char* operation) const;
  static void prepare_all();

 protected:
  void launch(const char* operation, const Launch& launch, void** parameters) const;

 private:
  const void* function_;
  std::int64_t most_shared_bytes_;
  bool large_cluster_;                              // more than 8 blocks
  mutable std::atomic<std::uint64_t> prepared_{0};  // a bit per device
  const AnyKernel* next_;
};

template <class... Parameters>
class Kernel : public AnyKernel {
 public:
  // `most_shared_bytes`: the largest dynamic shared memory of any launch; where the device has
  // less, all that it has.
  explicit Kernel(void (*function)(Parameters...), std::int64_t most_shared_bytes = 0,
                  bool large_cluster = false)
      : AnyKernel(reinterpret_cast<const void*>(function), most_shared_bytes, large_cluster) {}

  // A grid without blocks launches nothing.
  void launch(const char* operation, const Launch& launch, Parameters... parameters) const {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    AnyKernel::launch(operation, launch, addresses);
  }
};

// Of the current device: streaming multiprocessors, and the most shared memory of a block, in
// bytes.
int processors();
std::int64_t shared_limit();

// Fails with kDevice if a call of the CUDA runtime failed.
void check(const char* operation, cudaError_t error, const char* action);

}  // namespace winnow::cuda
