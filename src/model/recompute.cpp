#include "model/recompute.h"

namespace winnow::model {

void check(const Recompute& r, const ModelConfig& config, Rules& rules) {
  const bool parts = r.core_attention || r.norms || r.mlp || r.query_up_projection;
  rules.require(!r.full || !parts, "recompute", "", "\"full\"",
                "\"full\" makes everything again: name it alone, without parts");
  rules.require(!r.core_attention || !config.mtp_shared_components.latent_kv, "recompute", "",
                "\"full\"",
                "\"core_attention\" must not be combined with mtp_shared_components \"latent_kv\": "
                "use recompute \"full\", or share \"sparse_attention_index\" alone");
  rules.require(!r.reuse_checkpoint_topk || r.replays_selection(), "reuse_checkpoint_topk", "",
                "recompute \"core_attention\"",
                "needs recompute \"full\" or \"core_attention\": nothing else selects again");
  const std::int64_t pool_size = config.attention.indexer.pool_size;
  rules.require(!r.reuse_checkpoint_topk || pool_size <= 1, "reuse_checkpoint_topk", "", "false",
                "must not be combined with attention.indexer.pool_size = {}: a replay of pools "
                "selects again",
                pool_size);
}

void validate(const Recompute& recompute, const ModelConfig& config) {
  Rules strict;
  check(recompute, config, strict);
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
