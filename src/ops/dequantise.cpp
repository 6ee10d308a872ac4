#include "winnow/dequantise.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "dequantise";
constexpr const Implementation<DequantiseArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(dequantise) WINNOW_CPU_IMPLEMENTATIONS(dequantise) &
    ref::dequantise_implementation};

void check(const DequantiseArgs& a) {
  check_dtype(kName, "data", a.data, {DType::kE4M3});
  ops::check_rows(kName, "data", a.data);
  ops::check_group_scale(kName, "scale", a.scale, "data", a.data);
  check_dtype(kName, "output", a.output, {DType::kF32});
  ops::check_same_shape(kName, "output", a.output, "data", a.data);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void dequantise(const DequantiseArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t dequantise_workspace_bytes(const DequantiseArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const DequantiseArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
