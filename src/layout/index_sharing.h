// Which layers compute indices of their own, and whose indices the others reuse. Layers count from
// 1, as pipeline layouts and messages do; multi-token prediction is layer layers + 1.
//
// With o = max(skip_topk_offset, 1), the layers 1 to o compute, then every topk_freq-th after o:
// offset 3 and frequency 4 give 1, 2, 3, 7, 11, 15. Every other layer reuses the indices of the
// last one before it that computes.
#pragma once

#include <cstdint>

namespace winnow {

struct IndexSharing {
  std::int64_t topk_freq = 1;  // 1: every layer computes
  std::int64_t skip_topk_offset = 0;
};

// All three throw winnow::Error where topk_freq < 1, skip_topk_offset < 0 or layer < 1.

void check_index_sharing(const IndexSharing& sharing);

bool computes_indices(const IndexSharing& sharing, std::int64_t layer);

// The layer whose indices `layer` attends to: itself where it computes them.
std::int64_t index_source(const IndexSharing& sharing, std::int64_t layer);

}  // namespace winnow
