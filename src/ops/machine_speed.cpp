#include "ops/machine_speed.h"

#include <algorithm>
#include <chrono>

#include "base/array.h"
#include "base/cpu_features.h"
#include "base/device.h"
#include "base/parallel.h"
#include "base/speed_loops.h"
#if defined(WINNOW_CUDA)
#include "cuda/machine_speed.h"
#endif

namespace winnow {
namespace cpu::portable {
extern const SpeedLoops speed_loops;
}
#if defined(WINNOW_X86)
namespace cpu::avx2 {
extern const SpeedLoops speed_loops;
}
namespace cpu::avx512 {
extern const SpeedLoops speed_loops;
}
#endif

namespace {

constexpr std::int64_t kLevels[] = {64 << 10, 256 << 10, 1 << 20,  4 << 20,
                                    16 << 20, 64 << 20,  256 << 20};

thread_local volatile float sink;  // keeps the loops from being optimised away

const SpeedLoops& best_loops() {
#if defined(WINNOW_X86)
  if (refuse_instruction_set("avx512").empty()) return cpu::avx512::speed_loops;
  if (refuse_instruction_set("avx2").empty()) return cpu::avx2::speed_loops;
#endif
  return cpu::portable::speed_loops;
}

// Seconds of body(), the best of several runs: whatever else the machine does only adds time.
template <class Body>
double best_seconds(Body&& body) {
  using Clock = std::chrono::steady_clock;
  double best = 1e30, total = 0;
  for (int run = 0; run < 5 || (run < 100 && total < 0.03); ++run) {
    const Clock::time_point begin = Clock::now();
    body();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::min(best, seconds);
    total += seconds;
  }
  return best;
}

MachineSpeed::Level measure_level(const SpeedLoops& loops, float* memory, std::int64_t bytes,
                                  int threads) {
  const std::int64_t part = bytes / 4 / threads / 64 * 64;  // floats per thread
  const std::int64_t passes = std::max<std::int64_t>(1, (4 << 20) / bytes * threads);
  const double moved = static_cast<double>(4 * part * threads * passes);
  MachineSpeed::Level level{bytes, 0, 0};
  level.write = moved / best_seconds([&] {
                  parallel_for(threads, [&](std::int64_t task, int) {
                    for (std::int64_t pass = 0; pass < passes; ++pass)
                      loops.write(memory + task * part, part, 0.5f);
                  });
                });
  level.read = moved / best_seconds([&] {
                 parallel_for(threads, [&](std::int64_t task, int) {
                   for (std::int64_t pass = 0; pass < passes; ++pass)
                     sink = loops.read(memory + task * part, part);
                 });
               });
  return level;
}

#if defined(WINNOW_CUDA)

constexpr std::int64_t kGpuLevels[] = {16 << 20, 32 << 20, 256 << 20, 1 << 30};

// Seconds of what queue() queues, the best of several runs.
template <class Queue>
double best_device_seconds(Device device, Queue&& queue) {
  DeviceTimer timer(device);
  double best = 1e30;
  for (int run = 0; run < 6; ++run) {
    timer.start({});
    queue();
    best = std::min(best, timer.stop_ms({}) / 1e3);
  }
  return best;
}

MachineSpeed measure_gpu(Device device) {
  const DeviceScope scope(device);
  const CudaDevice& gpu = cuda_devices()[static_cast<std::size_t>(device.index)];
  MachineSpeed speed{gpu.processors, gpu.name + ", bf16 mma.sync", 0, {}};
  const DeviceMemory memory(device, kGpuLevels[std::size(kGpuLevels) - 1]);
  auto* floats = static_cast<float*>(memory.data());
  cuda::queue_writes(floats, memory.bytes() / 4, 1);
  double flops = 0;
  const double seconds =
      best_device_seconds(device, [&] { flops = cuda::queue_products(20'000, floats); });
  speed.flops = flops / seconds;
  for (const std::int64_t bytes : kGpuLevels) {
    const std::int64_t passes = std::max<std::int64_t>(1, (std::int64_t{1} << 30) / bytes);
    const auto moved = static_cast<double>(bytes * passes);
    const double read =
        best_device_seconds(device, [&] { cuda::queue_reads(floats, bytes / 4, passes, floats); });
    const double write =
        best_device_seconds(device, [&] { cuda::queue_writes(floats, bytes / 4, passes); });
    speed.levels.push_back({bytes, moved / read, moved / write});
  }
  return speed;
}

#endif

}  // namespace

double MachineSpeed::bandwidth(double bytes) const {
  double speed = levels.front().read;
  for (const Level& level : levels) {
    if (static_cast<double>(level.bytes) <= bytes) speed = std::max(level.read, level.write);
  }
  return speed;
}

double MachineSpeed::floor_seconds(double work_flops, double work_bytes) const {
  return std::max(work_flops / flops, work_bytes / bandwidth(work_bytes));
}

MachineSpeed measure_machine([[maybe_unused]] Device device) {
#if defined(WINNOW_CUDA)
  if (device.kind == Device::Kind::kCuda) return measure_gpu(device);
#endif
  const SpeedLoops& loops = best_loops();
  MachineSpeed speed{num_threads(), loops.instruction_set, 0, {}};
  constexpr std::int64_t kSteps = 200'000;
  const double seconds = best_seconds([&] {
    parallel_for(speed.threads, [&](std::int64_t, int) { sink = loops.multiply(kSteps); });
  });
  speed.flops = static_cast<double>(loops.flops_per_step * kSteps) * speed.threads / seconds;
  const Array memory(DType::kF32, {kLevels[std::size(kLevels) - 1] / 4});
  for (std::int64_t bytes : kLevels)
    speed.levels.push_back(measure_level(loops, memory.as<float>(), bytes, speed.threads));
  return speed;
}

}  // namespace winnow
