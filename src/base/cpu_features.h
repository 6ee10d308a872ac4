// What the processor can do, asked once.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/refusal.h"

namespace winnow {

struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C, BMI1 and BMI2 together
  bool avx512 = false;  // AVX-512 F, BW, DQ and VL together, and all of avx2
  bool avx512_bf16 = false;
  bool amx = false;  // AMX tiles and BF16 products, which the system lets us use, and all of avx512
  std::string model;
  std::vector<std::string> names() const;  // of those that are there
};

const CpuFeatures& cpu_features();

// WINNOW_CPU=portable|avx2|avx512|amx limits the instruction sets that implementations may use,
// each including those before it. Returns why `level` must not run here.
Refusal refuse_instruction_set(std::string_view level);

}  // namespace winnow
