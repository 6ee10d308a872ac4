#include "winnow/tile_scales.h"

#include "base/run_first.h"
#include "ops/lists.h"
#include "ops/rules.h"

namespace winnow {
namespace {

constexpr char kName[] = "tile_scales";
constexpr const Implementation<TileScalesArgs>* kList[] = {
    WINNOW_CUDA_IMPLEMENTATION(tile_scales) WINNOW_CPU_IMPLEMENTATIONS(tile_scales) &
    ref::tile_scales_implementation};

void check(const TileScalesArgs& a) {
  check_shape(kName, "scale", a.scale, {-1, -1, -1}, "[tokens, heads, groups]");
  check_dtype(kName, "scale", a.scale, {DType::kE8M0});
  const std::int64_t heads = a.scale.shape[1], groups = a.scale.shape[2];
  WINNOW_CHECK(kName, heads >= 1 && groups >= 1,
               "scale needs at least one head and one group, got {}", shape_text(a.scale));
  ops::check_tensor(kName, "cu_seqlens", a.cu_seqlens, DType::kI32, {-1}, "[sequences + 1]");
  WINNOW_CHECK(kName, a.cu_seqlens.shape[0] >= 1, "cu_seqlens needs at least one entry, got 0");
  ops::check_tensor(kName, "padded_cu_seqlens", a.padded_cu_seqlens, DType::kI32,
                    {a.cu_seqlens.shape[0]}, "[sequences + 1]");
  ops::check_tensor(kName, "tiles", a.tiles, DType::kE8M0,
                    {-1, ceil_div(groups, kScaleTileGroups), kScaleTileBytes},
                    "[rows / 128, ceil(groups / 4), 512]");
  WINNOW_CHECK(kName, a.tiles.contiguous(), "tiles must be contiguous, got stride {} on axis 0",
               a.tiles.strides[0]);
  ops::check_memory(kName, ops::inputs_of(a), ops::outputs_of(a));
}

}  // namespace

void tile_scales(const TileScalesArgs& args, Workspace workspace) {
  check(args);
  ops::check_data(kName, ops::inputs_of(args), ops::outputs_of(args));
  run_first(kName, kList, ops::device_of(args), args, workspace);
}

std::int64_t tile_scales_workspace_bytes(const TileScalesArgs& args) {
  check(args);
  return workspace_bytes_of(kName, kList, ops::device_of(args), args);
}

Explanation explain(const TileScalesArgs& args) {
  check(args);
  return explain_call(kName, kList, ops::device_of(args), args);
}

}  // namespace winnow
