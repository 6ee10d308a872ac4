// tile_scales on GPUs: a thread gathers the four bytes of a row of a tile, or the scales of one
// head of a token. Sequences are found by bisection. Bound by memory.
#include "base/implementation.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "cuda/rows.h"
#include "winnow/tile_scales.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 256;

struct Tiling {
  std::uint8_t* scale;
  std::int64_t token_stride, head_stride, group_stride;
  std::int64_t tokens, heads, groups;
  IntRows cu_seqlens, padded_cu_seqlens;
  std::int64_t boundaries;
  std::uint8_t* tiles;
  std::int64_t rows;  // of all tiles
};

__device__ std::int64_t tile_byte(std::int64_t row, std::int64_t group, std::int64_t groups) {
  const std::int64_t tile = row / kScaleTileRows * ((groups + 3) / 4) + group / 4;
  return tile * kScaleTileBytes + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

// A token of one numbering in the other; -1: it has no counterpart. The last sequence that begins
// at or before the token is the only one that can hold it.
__device__ std::int64_t counterpart(const IntRows& from, const IntRows& to, std::int64_t boundaries,
                                    std::int64_t token) {
  std::int64_t low = 0, high = boundaries;  // from[low] <= token < from[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (from[middle] <= token ? low : high) = middle;
  }
  if (low + 1 >= boundaries || from[low] > token) return -1;
  const std::int64_t other = to[low] + token - from[low];
  return token < from[low + 1] && other < to[low + 1] ? other : -1;
}

__global__ void __launch_bounds__(kThreads) fill_tiles(Tiling t) {
  const std::int64_t words = ceil_div(t.groups, kScaleTileGroups);  // of a row
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= t.rows * words) return;
  const std::int64_t row = n / words, first = n % words * kScaleTileGroups;
  const std::int64_t token =
      counterpart(t.padded_cu_seqlens, t.cu_seqlens, t.boundaries, row / t.heads);
  const bool present = token >= 0 && token < t.tokens;
  const std::uint8_t* scales =
      t.scale + (present ? token * t.token_stride + row % t.heads * t.head_stride : 0);
  std::uint8_t* tile = t.tiles + tile_byte(row, first, t.groups);
  for (std::int64_t g = 0; g < kScaleTileGroups; ++g) {
    tile[g] =
        present && first + g < t.groups ? scales[(first + g) * t.group_stride] : std::uint8_t{0};
  }
}

__global__ void __launch_bounds__(kThreads) fill_scales(Tiling t) {
  const std::int64_t n = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= t.tokens * t.heads) return;
  const std::int64_t token = n / t.heads, head = n % t.heads;
  const std::int64_t padded = counterpart(t.cu_seqlens, t.padded_cu_seqlens, t.boundaries, token);
  const std::int64_t row = padded * t.heads + head;
  std::uint8_t* scales = t.scale + token * t.token_stride + head * t.head_stride;
  for (std::int64_t g = 0; g < t.groups; ++g) {
    scales[g * t.group_stride] =
        padded >= 0 && row < t.rows ? t.tiles[tile_byte(row, g, t.groups)] : std::uint8_t{0};
  }
}

const Kernel kFillTiles{fill_tiles}, kFillScales{fill_scales};

Refusal refuse(const TileScalesArgs&) { return {}; }

std::int64_t workspace_bytes(const TileScalesArgs&) { return 0; }

void run(const TileScalesArgs& a, Workspace workspace) {
  const Tiling t{
      a.scale.as<std::uint8_t>(), a.scale.strides[0],         a.scale.strides[1],
      a.scale.strides[2],         a.scale.shape[0],           a.scale.shape[1],
      a.scale.shape[2],           IntRows(a.cu_seqlens),      IntRows(a.padded_cu_seqlens),
      a.cu_seqlens.shape[0],      a.tiles.as<std::uint8_t>(), a.tiles.shape[0] * kScaleTileRows};
  const std::int64_t work =
      a.inverse ? t.tokens * t.heads : t.rows * ceil_div(t.groups, kScaleTileGroups);
  const Kernel<Tiling>& kernel = a.inverse ? kFillScales : kFillTiles;
  kernel.launch("tile_scales",
                {.grid = dim3(static_cast<unsigned>(ceil_div(work, kThreads))),
                 .block = dim3(kThreads),
                 .stream = stream_of(workspace)},
                t);
}

}  // namespace

extern const Implementation<TileScalesArgs> tile_scales_implementation;
const Implementation<TileScalesArgs> tile_scales_implementation = {"cuda.portable", refuse,
                                                                   workspace_bytes, run};

}  // namespace winnow::cuda
