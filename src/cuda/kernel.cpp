#include "cuda/kernel.h"

#include <algorithm>

#include "base/check.h"
#include "winnow/device.h"

namespace winnow::cuda {
namespace {

const AnyKernel* all_kernels = nullptr;  // filled before main; constant from then on

int current_device() {
  int device = 0;
  check("cuda", cudaGetDevice(&device), "ask for the current GPU");
  return device;
}

}  // namespace

void check(const char* operation, cudaError_t error, const char* action) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // taken note of
  fail(Status::kDevice, operation, "cannot {}: {}", action, cudaGetErrorString(error));
}

int processors() { return cuda_devices()[static_cast<std::size_t>(current_device())].processors; }

std::int64_t shared_limit() {
  int bytes = 0;
  check("cuda",
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device()),
        "ask a GPU for its shared memory");
  return bytes;
}

AnyKernel::AnyKernel(const void* function, std::int64_t most_shared_bytes, bool large_cluster)
    : function_(function),
      most_shared_bytes_(most_shared_bytes),
      large_cluster_(large_cluster),
      next_(all_kernels) {
  all_kernels = this;
}

void AnyKernel::prepare(const char* operation) const {
  const int device = current_device();
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((prepared_.load(std::memory_order_acquire) & bit) != 0) return;
  cudaFuncAttributes loaded{};
  check(operation, cudaFuncGetAttributes(&loaded, function_), "load a kernel");
  if (most_shared_bytes_ > 0) {
    const auto fixed = static_cast<std::int64_t>(loaded.sharedSizeBytes);
    const std::int64_t most = std::min(most_shared_bytes_, shared_limit() - fixed);
    check(operation,
          cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(most)),
          "raise the shared memory of a kernel");
  }
  if (large_cluster_) {
    check(operation,
          cudaFuncSetAttribute(function_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "raise the cluster size of a kernel");
  }
  prepared_.fetch_or(bit, std::memory_order_release);
}

void AnyKernel::prepare_all() {
  const int device = current_device();
  const int capability = cuda_devices()[static_cast<std::size_t>(device)].major;
  for (const AnyKernel* k = all_kernels; k != nullptr; k = k->next_) {
    // What is written for compute capability 9.0 alone has no code for other devices.
    cudaFuncAttributes loaded{};
    if (cudaFuncGetAttributes(&loaded, k->function_) == cudaErrorNoKernelImageForDevice &&
        capability != 9) {
      cudaGetLastError();
      continue;
    }
    k->prepare("warmup");
  }
}

void AnyKernel::launch(const char* operation, const Launch& launch, void** parameters) const {
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return;
  prepare(operation);
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = static_cast<std::size_t>(launch.shared_bytes);
  config.stream = launch.stream;
  cudaLaunchAttribute cluster{};
  if (launch.cluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = launch.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  check(operation, cudaLaunchKernelExC(&config, function_, parameters), "launch a kernel");
}

}  // namespace winnow::cuda
