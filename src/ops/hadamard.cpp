#include "winnow/hadamard.h"

#include <bit>

#include "base/row_offset.h"
#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "hadamard";
constexpr const Implementation<HadamardArgs>* kList[] = {WINNOW_CUDA_IMPLEMENTATION(hadamard)
                                                             WINNOW_CPU_IMPLEMENTATIONS(hadamard) &
                                                         ref::hadamard_implementation};

bool in_place(const HadamardArgs& a) {
  return a.input.data == a.output.data && a.input.dtype == a.output.dtype &&
         a.input.strides == a.output.strides;
}

void check(const HadamardArgs& a) {
  check_dtype(kName, "input", a.input, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  check_dtype(kName, "output", a.output, {DType::kF64, DType::kF32, DType::kBF16, DType::kF16});
  WINNOW_CHECK(kName, a.output.dtype != DType::kF64 || a.input.dtype == DType::kF64,
               "output can be f64 only where input is, got {}", dtype_name(a.input.dtype));
  ops::check_rows(kName, "input", a.input);
  ops::check_same_shape(kName, "output", a.output, "input", a.input);
  const std::int64_t dim = last_extent(a.input);
  WINNOW_CHECK(kName, dim > 0 && std::has_single_bit(static_cast<std::uint64_t>(dim)),
               "the last axis of input must be a power of two, got {}", dim);
  if (in_place(a)) {
    ops::check_memory(kName, {}, ops::outputs_of(a));
  } else {
    ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
  }
}

}  // namespace

void hadamard(const HadamardArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t hadamard_workspace_bytes(const HadamardArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const HadamardArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
