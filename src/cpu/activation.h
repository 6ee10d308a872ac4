// What happens to a dot product of the indexer before the head's weight: a factor, then ReLU or
// not.
#pragma once

#include "cpu/simd.h"

namespace winnow::cpu::WINNOW_ISA {

struct Activation {
  float scale;  // the factor
  float floor;  // 0 for ReLU, -inf for none
  explicit Activation(bool relu, double dot_scale = 1)
      : scale(static_cast<float>(dot_scale)), floor(relu ? 0.f : -__builtin_inff()) {}
};

}  // namespace winnow::cpu::WINNOW_ISA
