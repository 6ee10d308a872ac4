// The loops that measure a processor; each instruction set of src/cpu exports its own.
#pragma once

#include <cstdint>

namespace winnow {

struct SpeedLoops {
  const char* instruction_set;
  std::int64_t flops_per_step;            // of `multiply`
  float (*multiply)(std::int64_t steps);  // multiply-adds in registers, as many chains as fit
  float (*read)(const float* p, std::int64_t n);         // n: a multiple of 64
  void (*write)(float* p, std::int64_t n, float value);  // n: a multiple of 64
};

}  // namespace winnow
