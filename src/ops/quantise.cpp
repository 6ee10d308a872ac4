#include "winnow/quantise.h"

#include <cmath>

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "quantise";
constexpr const Implementation<QuantiseArgs>* kList[] = {WINNOW_CUDA_IMPLEMENTATION(quantise)
                                                             WINNOW_CPU_IMPLEMENTATIONS(quantise) &
                                                         ref::quantise_implementation};

void check(const QuantiseArgs& a) {
  check_dtype(kName, "input", a.input, {DType::kF32, DType::kBF16, DType::kF16});
  ops::check_rows(kName, "input", a.input);
  check_dtype(kName, "data", a.data, {DType::kE4M3});
  ops::check_same_shape(kName, "data", a.data, "input", a.input);
  ops::check_group_scale(kName, "scale", a.scale, "input", a.input);
  WINNOW_CHECK(kName, a.power_of_two || a.scale.dtype != DType::kE8M0,
               "an e8m0 scale needs power_of_two, got false");
  WINNOW_CHECK(kName, std::isfinite(a.amax_floor) && a.amax_floor >= 0 && a.amax_floor <= 1e30,
               "amax_floor must be from 0 to 1e30, got {}", a.amax_floor);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void quantise(const QuantiseArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t quantise_workspace_bytes(const QuantiseArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const QuantiseArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
