// attention_target[i, s] = sum_h exp(softmax_scale * query . key[id_s] - lse), in double.
#include "ref/attention_mass.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

void run(const AttentionTargetArgs& a, Workspace) {
  const std::int64_t rows = a.query.shape[0], keys = a.key.shape[0];
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    for (std::int64_t s = 0; s < a.topk_indices.shape[1]; ++s) {
      const std::int64_t id = get_id(a.topk_indices, i, s);
      set(a.attention_target, i, s,
          range.contains(id) ? attention_mass(a.query, a.key, a.lse, a.softmax_scale, i, id) : 0);
    }
  }
}

}  // namespace

const Implementation<AttentionTargetArgs> attention_target_implementation = {"reference", accept,
                                                                             no_workspace, run};

}  // namespace winnow::ref
