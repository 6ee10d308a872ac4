// dequantise on CPUs: codes to f32, eight at a time, times the scale of their group. Bound by
// memory.
#include "winnow/dequantise.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/row_offset.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskRows = 64;

Refusal refuse(const DequantiseArgs& a) {
  if (!has_unit_stride(a.data) || !has_unit_stride(a.scale) || !has_unit_stride(a.output)) {
    return "data, scale and output must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const DequantiseArgs&) { return 0; }

void dequantise_row(const DequantiseArgs& a, std::int64_t row) {
  const std::int64_t groups = last_extent(a.scale), size = last_extent(a.data) / groups;
  const E4M3* data = a.data.as<E4M3>() + row_offset(a.data, row);
  float* out = a.output.as<float>() + row_offset(a.output, row);
  const std::int64_t from = row_offset(a.scale, row);
  for (std::int64_t g = 0; g < groups; ++g, data += size, out += size) {
    const float scale = a.scale.dtype == DType::kE8M0 ? to_float(a.scale.as<E8M0>()[from + g])
                                                      : a.scale.as<float>()[from + g];
    std::int64_t d = 0;
    for (; d + 8 <= size; d += 8) store(out + d, load(data + d) * splat(scale));
    for (; d < size; ++d) out[d] = to_float(data[d]) * scale;
  }
}

void run(const DequantiseArgs& a, Workspace) {
  const std::int64_t rows = row_count(a.data);
  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int) {
    for (std::int64_t i = task * kTaskRows; i < min64(rows, (task + 1) * kTaskRows); ++i) {
      dequantise_row(a, i);
    }
  });
}

}  // namespace

extern const Implementation<DequantiseArgs> dequantise_implementation;
const Implementation<DequantiseArgs> dequantise_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                  refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
