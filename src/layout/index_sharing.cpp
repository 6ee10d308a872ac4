#include "layout/index_sharing.h"

#include <algorithm>

#include "base/check.h"

namespace winnow {

void check_index_sharing(const IndexSharing& sharing) {
  WINNOW_CHECK("index_sharing", sharing.topk_freq >= 1, "topk_freq must be at least 1, got {}",
               sharing.topk_freq);
  WINNOW_CHECK("index_sharing", sharing.skip_topk_offset >= 0,
               "skip_topk_offset must be at least 0, got {}", sharing.skip_topk_offset);
}

std::int64_t index_source(const IndexSharing& sharing, std::int64_t layer) {
  check_index_sharing(sharing);
  WINNOW_CHECK("index_sharing", layer >= 1, "layers count from 1, got {}", layer);
  const std::int64_t first = std::max<std::int64_t>(sharing.skip_topk_offset, 1);
  return layer <= first ? layer : layer - (layer - first) % sharing.topk_freq;
}

bool computes_indices(const IndexSharing& sharing, std::int64_t layer) {
  return index_source(sharing, layer) == layer;
}

}  // namespace winnow
