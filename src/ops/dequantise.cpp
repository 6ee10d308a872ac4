#include "winnow/dequantise.h"

#include <array>

#include "base/implementation.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "dequantise";
constexpr const Implementation<DequantiseArgs>* kList[] = {WINNOW_CPU_IMPLEMENTATIONS(dequantise) &
                                                           ref::dequantise_implementation};

auto inputs_of(const DequantiseArgs& a) {
  return std::array{ops::Named{"data", a.data}, ops::Named{"scale", a.scale}};
}
auto outputs_of(const DequantiseArgs& a) { return std::array{ops::Named{"output", a.output}}; }

void check(const DequantiseArgs& a) {
  check_dtype(kName, "data", a.data, {DType::kE4M3});
  ops::check_rows(kName, "data", a.data);
  ops::check_group_scale(kName, "scale", a.scale, "data", a.data);
  check_dtype(kName, "output", a.output, {DType::kF32});
  ops::check_same_shape(kName, "output", a.output, "data", a.data);
  ops::check_memory(kName, inputs_of(a), outputs_of(a));
}

}  // namespace

void dequantise(const DequantiseArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, inputs_of(args), outputs_of(args));
  run_first(kName, kList, args, workspace);
}

std::int64_t dequantise_workspace_bytes(const DequantiseArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, args);
}

Explanation explain(const DequantiseArgs& args) {
  check(args);
  return explain_call(kName, kList, args);
}

}  // namespace winnow
