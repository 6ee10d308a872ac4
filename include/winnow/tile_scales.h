// tile_scales: scales of MXFP8 into the 128 x 4 tiles of scale_tiles.h, and back.
//
// - Token cu_seqlens[s] + i of sequence s becomes padded token padded_cu_seqlens[s] + i, and its
//   head h the row (padded token) * heads + h of the tiles.
// - Into tiles: bytes of padding (groups, tokens, rows after the last sequence) are 0. Tokens that
//   no sequence or no tile has room for are left out.
// - Back (inverse): every scale is written; 0 where its token is in no sequence or no tile.
// - Sizes come from shapes alone: the number of tiles may be that of scale_token_capacity.
// - Source: the block-scale layout of NVIDIA's tensor cores, cuBLAS documentation, "Scaling Factors
//   Layouts" (scale_tiles.h).
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/scale_tiles.h"
#include "winnow/tensor.h"

namespace winnow {

struct TileScalesArgs {
  Tensor scale;              // e8m0 [tokens, heads, groups]; heads is 1 for index keys
  Tensor cu_seqlens;         // int32 [sequences + 1], from 0, not falling
  Tensor padded_cu_seqlens;  // int32 [sequences + 1], of layout's padded_cu_seqlens
  Tensor tiles;              // e8m0 [rows / 128, ceil(groups / 4), 512], contiguous
  bool inverse = false;      // false: scale is read, tiles are written; true: the other way
};

void tile_scales(const TileScalesArgs& args, Workspace workspace);
std::int64_t tile_scales_workspace_bytes(const TileScalesArgs& args);
Explanation explain(const TileScalesArgs& args);

}  // namespace winnow
