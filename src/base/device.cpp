#include "base/device.h"

#include "base/check.h"

#if defined(WINNOW_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace winnow {
namespace {

struct Devices {
  std::vector<CudaDevice> list;
  std::string refusal;
};

#if defined(WINNOW_CUDA)

void check_cuda(cudaError_t error, const char* action) {
  if (error == cudaSuccess) return;
  fail(Status::kDevice, "cuda", "cannot {}: {}", action, cudaGetErrorString(error));
}

Devices ask() {
  Devices d;
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    cudaGetLastError();  // taken note of
    d.refusal = error != cudaSuccess ? cudaGetErrorString(error) : "there is no GPU";
    return d;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    check_cuda(cudaGetDeviceProperties(&p, i), "read the properties of a GPU");
    d.list.push_back({p.name, p.major, p.minor, p.multiProcessorCount,
                      static_cast<std::int64_t>(p.totalGlobalMem)});
  }
  return d;
}

#else

[[noreturn]] void check_cuda(int, const char* action) {
  fail(Status::kUnsupported, "cuda", "cannot {}: this winnow is built without CUDA", action);
}

Devices ask() { return {{}, "not built"}; }

#endif

const Devices& devices() {
  static const Devices instance = ask();
  return instance;
}

}  // namespace

const std::vector<CudaDevice>& cuda_devices() { return devices().list; }
const std::string& cuda_refusal() { return devices().refusal; }

Refusal refuse_device(std::string_view implementation, Device device) {
  const bool on_gpu = device.kind == Device::Kind::kCuda;
  if (implementation.substr(0, 5) != "cuda.") {
    return on_gpu ? Refusal("the tensors lie on a GPU") : Refusal();
  }
  if (!on_gpu) return "the tensors lie in CPU memory";
  if (device.index < 0 || device.index >= static_cast<int>(cuda_devices().size())) {
    return "there is no such GPU";
  }
  const CudaDevice& gpu = cuda_devices()[static_cast<std::size_t>(device.index)];
  if (implementation.substr(0, 9) == "cuda.sm90" && (gpu.major != 9 || gpu.minor != 0)) {
    return "it is for compute capability 9.0 (H100, H200) alone";
  }
  if (gpu.major < 8) return "it needs a GPU of compute capability 8.0 or later";
  return {};
}

#if defined(WINNOW_CUDA)

DeviceScope::DeviceScope(Device device) {
  if (device.kind != Device::Kind::kCuda) return;
  check_cuda(cudaGetDevice(&before_), "ask for the current GPU");
  check_cuda(cudaSetDevice(device.index), "use the GPU");
}
DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
}

DeviceMemory::DeviceMemory(Device device, std::int64_t bytes) : device_(device), bytes_(bytes) {
  const DeviceScope scope(device);
  if (bytes > 0)
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(bytes)), "allocate GPU memory");
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) cudaFree(data_);
}

void copy_to_device(Device device, void* to, const void* from, std::int64_t bytes) {
  const DeviceScope scope(device);
  check_cuda(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
             "copy to the GPU");
}
void copy_to_host(Device device, void* to, const void* from, std::int64_t bytes) {
  const DeviceScope scope(device);
  check_cuda(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
             "copy from the GPU");
}
void synchronise(Device device) {
  const DeviceScope scope(device);
  check_cuda(cudaDeviceSynchronize(), "finish the work on the GPU");
}

DeviceTimer::DeviceTimer(Device device) : device_(device) {
  const DeviceScope scope(device_);
  for (void** event : {&first_, &last_}) {
    cudaEvent_t made = nullptr;
    check_cuda(cudaEventCreate(&made), "create an event");
    *event = made;
  }
}
DeviceTimer::~DeviceTimer() {
  for (void* event : {first_, last_}) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}
void DeviceTimer::start(Stream stream) {
  const DeviceScope scope(device_);
  check_cuda(
      cudaEventRecord(static_cast<cudaEvent_t>(first_), static_cast<cudaStream_t>(stream.handle)),
      "record an event");
}
double DeviceTimer::stop_ms(Stream stream) {
  const DeviceScope scope(device_);
  const auto first = static_cast<cudaEvent_t>(first_), last = static_cast<cudaEvent_t>(last_);
  check_cuda(cudaEventRecord(last, static_cast<cudaStream_t>(stream.handle)), "record an event");
  check_cuda(cudaEventSynchronize(last), "wait for the GPU");
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, first, last), "read the time of the GPU");
  return ms;
}

#else

DeviceScope::DeviceScope(Device device) {
  if (device.kind == Device::Kind::kCuda) check_cuda(0, "use a GPU");
}
DeviceScope::~DeviceScope() = default;
DeviceMemory::DeviceMemory(Device, std::int64_t) { check_cuda(0, "allocate GPU memory"); }
DeviceMemory::~DeviceMemory() = default;
void copy_to_device(Device, void*, const void*, std::int64_t) { check_cuda(0, "copy to a GPU"); }
void copy_to_host(Device, void*, const void*, std::int64_t) { check_cuda(0, "copy from a GPU"); }
void synchronise(Device) { check_cuda(0, "wait for a GPU"); }
DeviceTimer::DeviceTimer(Device) { check_cuda(0, "time a GPU"); }
DeviceTimer::~DeviceTimer() = default;
void DeviceTimer::start(Stream) {}
double DeviceTimer::stop_ms(Stream) { return 0; }

#endif

}  // namespace winnow
