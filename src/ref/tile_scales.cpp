// tile_scales by its definition: every token's scales to their bytes, one by one.
#include <cstring>

#include "base/numbers.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

std::int64_t entry(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}

// The padded token of a token; -1: it is in no sequence, or its sequence has no room for it.
std::int64_t padded_token(const TileScalesArgs& a, std::int64_t token) {
  for (std::int64_t s = 0; s + 1 < a.cu_seqlens.shape[0]; ++s) {
    if (token < entry(a.cu_seqlens, s) || token >= entry(a.cu_seqlens, s + 1)) continue;
    const std::int64_t padded = entry(a.padded_cu_seqlens, s) + token - entry(a.cu_seqlens, s);
    return padded < entry(a.padded_cu_seqlens, s + 1) ? padded : -1;
  }
  return -1;
}

void run(const TileScalesArgs& a, Workspace) {
  const std::int64_t heads = a.scale.shape[1], groups = a.scale.shape[2];
  const std::int64_t rows = a.tiles.shape[0] * kScaleTileRows;
  if (!a.inverse && a.tiles.elements() > 0) {
    std::memset(a.tiles.data, 0, static_cast<std::size_t>(a.tiles.elements()));
  }
  for (std::int64_t token = 0; token < a.scale.shape[0]; ++token) {
    const std::int64_t padded = padded_token(a, token);
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::int64_t g = 0; g < groups; ++g) {
        auto& scale =
            a.scale.as<std::uint8_t>()[token * a.scale.strides[0] + head * a.scale.strides[1] +
                                       g * a.scale.strides[2]];
        const std::int64_t row = padded * heads + head;
        const bool there = padded >= 0 && row < rows;
        if (a.inverse) scale = 0;
        if (!there) continue;
        auto& byte = a.tiles.as<std::uint8_t>()[scale_tile_byte(row, g, groups)];
        (a.inverse ? scale : byte) = a.inverse ? byte : scale;
      }
    }
  }
}

}  // namespace

const Implementation<TileScalesArgs> tile_scales_implementation = {"reference", accept,
                                                                   no_workspace, run};

}  // namespace winnow::ref
