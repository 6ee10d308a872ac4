#include "winnow/device.h"

#include "base/check.h"
#include "base/device.h"
#if defined(WINNOW_CUDA)
#include "cuda/kernel.h"
#endif

namespace winnow {

void warmup([[maybe_unused]] Device device) {
  WINNOW_CHECK("warmup", device.kind == Device::Kind::kCuda && cuda_refusal().empty(),
               "needs a GPU, but {}", cuda_refusal().empty() ? "got the CPU" : cuda_refusal());
  WINNOW_CHECK("warmup", device.index >= 0 && device.index < std::ssize(cuda_devices()),
               "the GPU must be from 0 to {}, got {}", std::ssize(cuda_devices()) - 1,
               device.index);
#if defined(WINNOW_CUDA)
  const DeviceScope scope(device);
  cuda::AnyKernel::prepare_all();
  synchronise(device);
#endif
}

}  // namespace winnow
