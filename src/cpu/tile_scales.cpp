// tile_scales on CPUs: each output is gathered by the task that owns it; sequences are found by
// bisection. Bound by memory.
#include "winnow/tile_scales.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskTokens = 64;

Refusal refuse(const TileScalesArgs&) { return {}; }

std::int64_t workspace_bytes(const TileScalesArgs&) { return 0; }

WINNOW_INLINE std::int64_t entry(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}

// A token of one numbering in the other; -1: it has no counterpart. The last sequence that begins
// at or before the token is the only one that can hold it.
std::int64_t counterpart(const Tensor& from, const Tensor& to, std::int64_t token) {
  std::int64_t low = 0, high = from.shape[0];  // from[low] <= token < from[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (entry(from, middle) <= token ? low : high) = middle;
  }
  if (low + 1 >= from.shape[0] || entry(from, low) > token) return -1;
  const std::int64_t other = entry(to, low) + token - entry(from, low);
  return token < entry(from, low + 1) && other < entry(to, low + 1) ? other : -1;
}

WINNOW_INLINE std::uint8_t* scales_of(const TileScalesArgs& a, std::int64_t token,
                                      std::int64_t head) {
  return a.scale.as<std::uint8_t>() + token * a.scale.strides[0] + head * a.scale.strides[1];
}

void fill_tiles(const TileScalesArgs& a) {
  const std::int64_t heads = a.scale.shape[1], groups = a.scale.shape[2];
  const std::int64_t width = a.tiles.shape[1] * kScaleTileGroups;
  parallel_for(a.tiles.shape[0], [&](std::int64_t tile, int) {
    std::int64_t padded = -1, token = -1;
    for (std::int64_t row = tile * kScaleTileRows; row < (tile + 1) * kScaleTileRows; ++row) {
      if (row / heads != padded) {
        padded = row / heads;
        token = counterpart(a.padded_cu_seqlens, a.cu_seqlens, padded);
        if (token >= a.scale.shape[0]) token = -1;
      }
      const std::uint8_t* scales = token < 0 ? nullptr : scales_of(a, token, row % heads);
      for (std::int64_t g = 0; g < width; ++g) {
        a.tiles.as<std::uint8_t>()[scale_tile_byte(row, g, groups)] =
            scales != nullptr && g < groups ? scales[g * a.scale.strides[2]] : std::uint8_t{0};
      }
    }
  });
}

void fill_scales(const TileScalesArgs& a) {
  const std::int64_t tokens = a.scale.shape[0], heads = a.scale.shape[1], groups = a.scale.shape[2];
  const std::int64_t rows = a.tiles.shape[0] * kScaleTileRows;
  parallel_for(ceil_div(tokens, kTaskTokens), [&](std::int64_t task, int) {
    for (std::int64_t token = task * kTaskTokens; token < min64(tokens, (task + 1) * kTaskTokens);
         ++token) {
      const std::int64_t padded = counterpart(a.cu_seqlens, a.padded_cu_seqlens, token);
      for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t row = padded * heads + head;
        std::uint8_t* scales = scales_of(a, token, head);
        for (std::int64_t g = 0; g < groups; ++g) {
          scales[g * a.scale.strides[2]] =
              padded >= 0 && row < rows
                  ? a.tiles.as<std::uint8_t>()[scale_tile_byte(row, g, groups)]
                  : std::uint8_t{0};
        }
      }
    }
  });
}

void run(const TileScalesArgs& a, Workspace) { a.inverse ? fill_scales(a) : fill_tiles(a); }

}  // namespace

extern const Implementation<TileScalesArgs> tile_scales_implementation;
const Implementation<TileScalesArgs> tile_scales_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                   refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
