// The side of one rank in a sum, on a GPU. A thread adds up one element in the order of the ranks:
// parts + 1 reads and writes of 4 bytes an element, which memory bounds.
#include <vector>

#include "base/device.h"
#include "comm/group_memory.h"
#include "cuda/kernel.h"

namespace winnow::comm {
namespace {

constexpr const char* kOperation = "sum";
constexpr int kThreads = 256;

template <class T>
__global__ void add_parts_kernel(const T* data, std::int64_t parts, std::int64_t count, T* sums) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    T sum = data[i];
    for (std::int64_t r = 1; r < parts; ++r) sum += data[r * count + i];
    sums[i] = sum;
  }
}

const cuda::Kernel kAddF32{add_parts_kernel<float>};
const cuda::Kernel kAddF64{add_parts_kernel<double>};

class GpuMemory final : public GroupMemory {
 public:
  GpuMemory(Device device, Stream stream)
      : device_(device), stream_(static_cast<cudaStream_t>(stream.handle)) {}
  ~GpuMemory() override {
    const DeviceScope scope(device_);
    for (std::byte* data : memory_) cudaFreeAsync(data, stream_);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  std::byte* allocate(std::int64_t bytes) override {
    const DeviceScope scope(device_);
    void* data = nullptr;
    cuda::check(kOperation, cudaMallocAsync(&data, static_cast<std::size_t>(bytes), stream_),
                "allocate GPU memory");
    memory_.push_back(static_cast<std::byte*>(data));
    return memory_.back();
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    const DeviceScope scope(device_);
    cuda::check(kOperation,
                cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice,
                                stream_),
                "copy on the GPU");
  }
  void zero(std::byte* data, std::int64_t bytes) override {
    const DeviceScope scope(device_);
    cuda::check(kOperation, cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream_),
                "write zeros on the GPU");
  }
  void add_parts(DType dtype, const std::byte* data, std::int64_t parts, std::int64_t count,
                 std::byte* sums) override {
    const DeviceScope scope(device_);
    const std::int64_t most = std::int64_t{16} * cuda::processors();
    const std::int64_t blocks = (count + kThreads - 1) / kThreads;
    const cuda::Launch launch = {.grid = static_cast<unsigned>(blocks < most ? blocks : most),
                                 .block = kThreads,
                                 .stream = stream_};
    if (dtype == DType::kF32) {
      kAddF32.launch(kOperation, launch, reinterpret_cast<const float*>(data), parts, count,
                     reinterpret_cast<float*>(sums));
    } else {
      kAddF64.launch(kOperation, launch, reinterpret_cast<const double*>(data), parts, count,
                     reinterpret_cast<double*>(sums));
    }
  }

 private:
  Device device_;
  cudaStream_t stream_;
  std::vector<std::byte*> memory_;
};

}  // namespace

std::unique_ptr<GroupMemory> gpu_memory(Device device, Stream stream) {
  return std::make_unique<GpuMemory>(device, stream);
}

}  // namespace winnow::comm
