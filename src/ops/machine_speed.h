// What this machine does at best, measured: the floor that benchmarks compare with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow {

struct MachineSpeed {
  struct Level {
    std::int64_t bytes = 0;      // working set of all threads together
    double read = 0, write = 0;  // bytes per second, over and over
  };
  int threads = 0;  // of a GPU: its multiprocessors
  std::string instruction_set;
  double flops = 0;           // multiply-adds in registers, two FLOPs each, per second; of a GPU:
                              // bf16 on the tensor cores
  std::vector<Level> levels;  // by rising size; the last is memory

  // Bytes per second for a problem of `bytes`: the level just below, so that what fits into a cache
  // is held against that cache.
  double bandwidth(double bytes) const;
  // No run of so much work can be faster, in seconds.
  double floor_seconds(double work_flops, double work_bytes) const;
};

// Runs the loops of src/cpu on num_threads() threads, with the best usable instruction set, or
// those of src/cuda on a GPU; takes about half a second and 256 MiB (1 GiB on a GPU).
MachineSpeed measure_machine(Device device = {});

}  // namespace winnow
