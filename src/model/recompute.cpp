#include "model/recompute.h"

#include "base/check.h"

namespace winnow::model {

void validate(const Recompute& r, const ModelConfig& config) {
  constexpr char kName[] = "config";
  const bool parts = r.core_attention || r.norms || r.mlp || r.query_up_projection;
  WINNOW_CHECK(kName, !r.full || !parts,
               "recompute \"full\" makes everything again: name it alone, without parts");
  WINNOW_CHECK(kName, !r.core_attention || !config.mtp_shared_components.latent_kv,
               "recompute \"core_attention\" must not be combined with mtp_shared_components "
               "\"latent_kv\": use recompute \"full\", or share \"sparse_attention_index\" alone");
  WINNOW_CHECK(kName, !r.reuse_checkpoint_topk || r.replays_selection(),
               "reuse_checkpoint_topk needs recompute \"full\" or \"core_attention\": nothing else "
               "selects again");
}

BlockKept place(const Recompute& r, attention::KeyCache& cache, bool own_selection,
                BlockActivations& own, BlockActivations& lent) {
  const auto at = [&](bool dropped) -> BlockActivations& { return dropped ? lent : own; };
  return {{cache, at(r.full).attention.latents, at(r.full || r.query_up_projection).attention.query,
           at(r.replays_selection()).attention.core,
           at(r.replays_selection() && !own_selection).attention.selection},
          at(r.full).middle,
          at(r.full || r.norms).norms,
          at(r.full || r.mlp).mlp};
}

}  // namespace winnow::model
