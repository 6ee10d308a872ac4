#include "plan/machine.h"

namespace winnow::plan {

const std::vector<Machine>& machines() {
  constexpr double kTera = 1e12, kGiga = 1e9;
  static const std::vector<Machine> all = {
      {"h200", "NVIDIA H200 SXM", 989.5 * kTera, 67 * kTera, 4800 * kGiga, 141 * kGiga, false},
      {"h100", "NVIDIA H100 SXM", 989.5 * kTera, 67 * kTera, 3350 * kGiga, 80 * kGiga, false},
      {"a100", "NVIDIA A100 SXM 80 GB", 312 * kTera, 19.5 * kTera, 2039 * kGiga, 80 * kGiga, false},
      {"cpu-core", "one core with AVX2 at 3 GHz, two multiply-adds of 8 lanes a clock", 96 * kGiga,
       96 * kGiga, 20 * kGiga, 0, true},
  };
  return all;
}

const Machine* find_machine(const std::string& name) {
  for (const Machine& machine : machines()) {
    if (machine.name == name) return &machine;
  }
  return nullptr;
}

}  // namespace winnow::plan
