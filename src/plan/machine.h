// Machines that time is estimated for, by name: what their makers state.
#pragma once

#include <string>
#include <vector>

#include "winnow/tensor.h"

namespace winnow::plan {

struct Machine {
  std::string name, text;
  double flops_bf16 = 0, flops_f32 = 0;  // a second, dense
  double bandwidth = 0;                  // bytes a second, of its memory
  double memory = 0;                     // bytes; 0: not said
  bool cpu = false;                      // winnow's CPU kernels run: their workspaces are asked for

  double flops(DType dtype) const { return dtype == DType::kF32 ? flops_f32 : flops_bf16; }
};

const std::vector<Machine>& machines();
const Machine* find_machine(const std::string& name);  // null if there is none

}  // namespace winnow::plan
