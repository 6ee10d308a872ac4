#include "plan/memory.h"

#include <algorithm>
#include <cmath>

#include "attention/context_group.h"
#include "plan/flops.h"
#include "plan/machine.h"
#include "plan/workspace.h"

namespace winnow::plan {
namespace {

using attention::AttentionConfig;
using attention::AttentionKind;
using attention::AttentionMode;
using attention::IndexerMode;
using attention::SelectionPrecision;

double number(std::int64_t n) { return static_cast<double>(n); }

constexpr double kF32 = 4, kI32 = 4, kI64 = 8;

// Sizes of one micro-batch on one rank, in bytes.
class Sizes {
 public:
  explicit Sizes(const PlanConfig& config)
      : c_(config),
        a_(config.model.attention),
        rows_(number(config.rows())),
        keys_(number(config.rows() * config.cp)),
        element_(number(dtype_bytes(config.dtype))),
        hidden_(number(a_.hidden_size)),
        heads_(number(a_.heads)),
        dim_qk_(number(a_.dim_qk())),
        dim_v_(number(a_.dim_v())) {}

  bool mla() const { return a_.kind == AttentionKind::kMla; }
  double stream() const { return rows_ * hidden_ * element_; }
  double row_numbers() const { return rows_ * kF32; }

  // What layers keep: the groups of attention/activations.h and model/recompute.h.
  double cache(bool indexer) const {
    const attention::IndexerConfig& i = a_.indexer;
    const double channels = mla() ? dim_qk_ : number(a_.kv_heads) * (dim_qk_ + dim_v_);
    double bytes = keys_ * channels * element_;
    if (!indexer) return bytes;
    const double scored = keys_ / number(i.pool_size), dim = number(i.index_dim);
    bytes += scored * dim * element_;
    if (i.precision == SelectionPrecision::kMxfp8) bytes += scored * dim * (1 + 1.0 / 32);
    if (i.precision == SelectionPrecision::kE4m3) bytes += scored * (dim + kF32);
    if (i.pools())
      bytes += 2 * number(i.pool_size - 1) * dim * element_;  // of a sequence that grows
    return bytes;
  }
  double latents() const {
    if (!mla()) return 0;
    const double query =
        a_.q_lora_rank > 0 ? rows_ * (2 * number(a_.q_lora_rank) * element_ + kF32) : 0;
    return query + rows_ * (number(a_.kv_lora_rank) * element_ + kF32);
  }
  double query() const {
    const double expanded = mla() ? number(a_.qk_nope_head_dim + a_.qk_rope_head_dim) : 0;
    return rows_ * heads_ * (expanded + dim_qk_) * element_;
  }
  double core() const {
    const double expanded = mla() ? number(a_.v_head_dim) : 0;
    return rows_ * heads_ * ((dim_v_ + expanded) * element_ + kF32);
  }
  double selection() const { return rows_ * number(a_.indexer.selection_width() + 1) * kI32; }
  double norm() const { return stream() + row_numbers(); }
  double mlp(const LayerParts& parts) const {
    const double dense = parts.mlp ? 3 * number(c_.model.intermediate_size) : 0;
    const double experts = parts.experts
                               ? 3 * number(c_.moe.intermediate_size) *
                                         number(c_.moe.experts_per_token + c_.moe.shared_experts) +
                                     hidden_ * number(c_.moe.experts_per_token)
                               : 0;
    return rows_ * (dense + experts) * element_;
  }
  double mamba() const {  // what comes out of its projection, and the scan's output
    const double inner = hidden_ * number(c_.mamba.expand);
    const double states = 2 * number(c_.mamba.groups) * number(c_.mamba.state_dim);
    return rows_ * (3 * inner + states + inner / number(c_.mamba.head_dim)) * element_;
  }
  double mtp_join() const { return 3 * stream() + 2 * row_numbers(); }

  // What every layer uses while it runs: gradients of the attention, then of what it comes from.
  double attention_backward() const {
    const double kv_heads = mla() ? 1 : number(a_.kv_heads);
    double bytes = rows_ * heads_ * (dim_qk_ * kF32 + dim_v_ * element_) +
                   keys_ * kv_heads * (dim_qk_ + (mla() ? 0 : dim_v_)) * kF32;
    if (!mla()) return bytes;
    bytes += rows_ * element_ *
             (heads_ * number(a_.qk_nope_head_dim + a_.qk_rope_head_dim + a_.v_head_dim) +
              2 * number(a_.q_lora_rank) + number(a_.kv_lora_rank));
    return bytes;
  }
  double indexer() const {
    const attention::IndexerConfig& i = a_.indexer;
    const double heads = number(i.index_heads), dim = number(i.index_dim);
    double bytes = rows_ * heads * (dim + 1) * element_;
    if (i.mode == IndexerMode::kStandard) bytes += rows_ * (dim * element_ + 2 * kF32);
    if (i.precision == SelectionPrecision::kMxfp8) {
      bytes += rows_ * heads * dim * (1 + 1.0 / 32) + rows_ * number(i.topk) * kF32;
    }
    if (i.precision == SelectionPrecision::kE4m3) {  // rotated, codes, scales
      bytes += rows_ * heads * (3 * dim + kF32);
    }
    if (i.pools()) {  // keys and gates before they are pooled, those of all ranks; selected pools
      const double gathered = c_.cp > 1 ? keys_ : 0;
      bytes += 2 * (rows_ + gathered) * dim * element_;
      bytes += rows_ * number(i.topk / i.pool_size + 1) * kI32;
    }
    return bytes;
  }
  double index_loss(bool dense) const {
    const attention::IndexerConfig& i = a_.indexer;
    const double heads = number(i.index_heads), dim = number(i.index_dim);
    double bytes = row_numbers() + (rows_ * heads * (dim + 1) + keys_ * dim) * kF32;
    if (!dense) bytes += 3 * rows_ * number(i.topk) * kF32;
    if (i.mode == IndexerMode::kStandard) bytes += rows_ * dim * element_;
    return bytes;
  }
  // Logits of the rows that the output head takes at a time (model/output_head.cpp).
  double logits() const {
    const std::int64_t vocab = c_.model.vocab_size;
    const std::int64_t chunk =
        std::min(c_.rows(), std::max<std::int64_t>(64, (std::int64_t{1} << 22) / vocab));
    return number(chunk) * number(vocab + 1) * element_;
  }
  double shared_key_gradient() const { return keys_ * dim_qk_ * kF32; }

  // Context parallelism, while a layer runs: the rows' own keys before they are gathered, and their
  // gradients after those of all ranks are summed; a block of rows on its way, and on the way back
  // what is sent and what is received of it (attention/context_group.h).
  double context(bool indexer, bool learns, bool backward) const {
    const double ranks = number(c_.cp), kv_heads = mla() ? 1 : number(a_.kv_heads),
                 index = indexer ? number(a_.indexer.index_dim) : 0,
                 value = mla() ? 0 : kv_heads * dim_v_, key = kv_heads * dim_qk_;
    double bytes = cache(indexer) / ranks;
    if (learns) bytes += rows_ * index * kF32;
    if (backward) bytes += rows_ * (key + value) * kF32;
    const double there = exchange(std::max({key, value, index}) * element_);
    double back = learns ? 2 * exchange(index * kF32) : 0;
    if (backward) back = std::max(back, 2 * exchange(std::max(key, value) * kF32));
    return bytes + std::max(there, back);
  }

 private:
  double exchange(double row_bytes) const {
    const double most =
        std::max(1.0, std::floor(number(attention::kExchangeBytes) / (row_bytes * number(c_.cp))));
    return std::min(rows_, most) * number(c_.cp) * row_bytes;
  }

  const PlanConfig& c_;
  const AttentionConfig& a_;
  const double rows_, keys_, element_, hidden_, heads_, dim_qk_, dim_v_;
};

// What is made again: of a warm-up, whose model does not go backward, nothing is kept at all.
model::Recompute dropped(const PlanConfig& c) {
  if (c.mode().attention != AttentionMode::kWarmup) return c.recompute;
  model::Recompute everything;
  everything.full = true;
  return everything;
}

// The bytes of one call of a layer: its own, and those that recomputation makes it borrow.
struct CallBytes {
  double own = 0, lent = 0, selection = 0, lent_selection = 0;
};

// Whether a later call attends to what this one selected.
bool has_consumers(const PlanConfig& c, std::int64_t layer, std::int64_t depth) {
  const std::int64_t layers = c.model.layers;
  if (layer > layers) {
    return depth == 0 && c.model.mtp_depths > 1 &&
           c.model.mtp_shared_components.sparse_attention_index;
  }
  const std::int64_t last = layers + (c.model.mtp_depths > 0 ? 1 : 0);
  return layer < last && index_source(c.model.sharing, layer + 1) <= layer;
}

CallBytes call_bytes(const PlanConfig& c, const Sizes& s, std::int64_t layer, std::int64_t depth) {
  const model::Recompute r = dropped(c);
  const LayerParts parts = layer_parts(c, layer);
  const bool indexer = parts.dsa && computes_indices(c.model.sharing, layer);
  CallBytes call;
  call.own = s.stream();
  if (layer == c.model.layers + 1) {  // what comes before a depth, and the norm after it
    (r.full ? call.lent : call.own) += s.mtp_join();
    call.own += s.stream() + s.norm();
  }
  const auto put = [&](bool dropped, double bytes) { (dropped ? call.lent : call.own) += bytes; };
  if (parts.attention) {
    const bool shared = depth > 0 && c.model.mtp_shared_components.latent_kv;
    const bool source = layer > c.model.layers && c.model.mtp_shared_components.latent_kv;
    if (!shared) put(r.full && !source, s.cache(indexer));
    put(r.full, s.latents());
    put(r.full || r.query_up_projection, s.query());
    put(r.replays_selection(), s.core());
  }
  if (parts.attention && c.mode().attention == AttentionMode::kSparse &&
      runs_indexer(c, layer, depth)) {
    const bool kept =
        !r.replays_selection() || r.reuse_checkpoint_topk || has_consumers(c, layer, depth);
    (kept ? call.selection : call.lent_selection) += s.selection();
  }
  if (!c.hybrid()) put(r.full, s.stream());  // between attention and MLP
  put(r.full || r.norms, (c.hybrid() ? 1 : 2) * s.norm());
  put(r.full || r.mlp, s.mlp(parts) + (parts.mamba ? s.mamba() : 0));
  return call;
}

double expert_parameters(const PlanConfig& c) {
  const double h = number(c.model.attention.hidden_size);
  const double one = 3 * h * number(c.moe.intermediate_size);
  return one * (number(c.moe.experts) / number(c.ep) + number(c.moe.shared_experts)) +
         (h + 1) * number(c.moe.experts);
}

double mamba_parameters(const PlanConfig& c) {
  constexpr double kTaps = 4;  // of the convolution
  const double h = number(c.model.attention.hidden_size), inner = h * number(c.mamba.expand),
               states = 2 * number(c.mamba.groups) * number(c.mamba.state_dim),
               heads = inner / number(c.mamba.head_dim);
  return h * (2 * inner + states + heads) + inner * h + (kTaps + 1) * (inner + states) + 3 * heads +
         inner;
}

}  // namespace

std::int64_t micro_batches_in_flight(std::int64_t ranks, std::int64_t virtual_stages,
                                     std::int64_t micro_batches, std::int64_t rank,
                                     std::int64_t virtual_stage) {
  if (virtual_stages == 1) return std::min(micro_batches, ranks - rank);
  const std::int64_t chunks = std::min(micro_batches * virtual_stages,
                                       (ranks - rank - 1) * 2 + (virtual_stages - 1) * ranks + 1);
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < chunks; ++n) {
    if (n / ranks % virtual_stages == virtual_stage) ++count;
  }
  return count;
}

RowChunks score_chunks(const PlanConfig& c) {
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  std::int64_t longest = c.context;
  if (!c.lengths.empty()) longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const std::int64_t columns = longest / c.model.attention.indexer.pool_size;
  return row_chunks(c.rows(), columns, DType::kF32,
                    static_cast<std::int64_t>(c.score_budget_gib * kGib));
}

double layer_parameters(const PlanConfig& c, std::int64_t layer) {
  const AttentionConfig& a = c.model.attention;
  const double h = number(a.hidden_size);
  const LayerParts parts = layer_parts(c, layer);
  double count = c.hybrid() ? h : 2 * h;  // norms
  if (parts.attention) count += number(model::attention_parameters(a));
  if (parts.dsa && computes_indices(c.model.sharing, layer)) {
    count += number(model::indexer_parameters(a));
  }
  if (parts.mlp) count += 3 * h * number(c.model.intermediate_size);
  if (parts.experts) count += expert_parameters(c);
  if (parts.mamba) count += mamba_parameters(c);
  return count;
}

// Multi-token prediction reads the embedding table and writes through the output head: its stage
// holds both.
double stage_parameters(const PlanConfig& c, const Stage& stage) {
  const double h = number(c.model.attention.hidden_size), table = h * number(c.model.vocab_size);
  const bool mtp = stage.mtp_depths > 0;
  const bool in = stage.embedding || mtp, out = stage.loss || mtp;
  const int tables = (in ? 1 : 0) + (out ? 1 : 0);
  double count = table * (c.model.tied_embeddings ? std::min(tables, 1) : tables);
  if (stage.loss) count += h;
  for (std::int64_t n = 0; n < stage.layers; ++n) {
    count += layer_parameters(c, stage.first_layer + n);
  }
  for (std::int64_t n = 1; mtp && n <= mtp_layers(c); ++n) {
    count += layer_parameters(c, c.model.layers + n);
  }
  return mtp ? count + (2 * h + 3) * h : count;  // what joins embedding and hidden state, and norms
}

StageMemory stage_memory(const PlanConfig& c, const PipelineLayout& layout, const Stage& stage) {
  const Sizes s(c);
  StageMemory m;
  m.parameters = stage_parameters(c, stage);
  m.weights = m.parameters * number(dtype_bytes(c.dtype));
  m.gradients = m.parameters * kF32;
  m.optimizer = m.parameters * (c.dtype == DType::kF32 ? 2 : 3) * kF32;
  if (c.shard_optimizer) m.optimizer /= number(c.dp * c.cp);
  m.in_flight = micro_batches_in_flight(layout.ranks, layout.virtual_stages, c.micro_batches(),
                                        stage.rank, stage.virtual_stage);

  const bool warmup = c.mode().attention == AttentionMode::kWarmup;
  if (warmup) m.in_flight = std::min<std::int64_t>(m.in_flight, 1);
  const std::int64_t depths = std::min(stage.mtp_depths, depths_run(c));
  const bool mtp = depths > 0;
  double kept = 0, selections = 0, lent = 0, lent_selection = 0;
  bool attends = false, indexes = false;
  LayerParts largest;
  const auto add = [&](std::int64_t layer, std::int64_t depth) {
    const CallBytes call = call_bytes(c, s, layer, depth);
    const LayerParts parts = layer_parts(c, layer);
    kept += call.own;
    selections += call.selection;
    lent = std::max(lent, call.lent);
    lent_selection = std::max(lent_selection, call.lent_selection);
    attends = attends || parts.attention;
    indexes = indexes || runs_indexer(c, layer, depth);
    if (s.mlp(parts) > s.mlp(largest)) largest = parts;
  };
  for (std::int64_t n = 0; n < stage.layers; ++n) add(stage.first_layer + n, 0);
  for (std::int64_t d = 0; d < depths; ++d) {
    for (std::int64_t n = 1; n <= mtp_layers(c); ++n) add(c.model.layers + n, d);
  }
  const bool ends = stage.loss || mtp;
  if (ends) kept += s.stream() + s.norm();  // the last state and its norm
  m.activations = kept * number(m.in_flight);
  m.selections = selections * number(m.in_flight);

  const bool works = stage.layers > 0 || mtp;
  m.temporaries = lent + lent_selection;
  if (works && !warmup) m.temporaries += 2 * s.stream() + s.mlp(largest);
  if (attends && !warmup) m.temporaries += s.attention_backward();
  if (indexes) m.temporaries += s.indexer();
  if (indexes && c.mode().index_loss) m.temporaries += s.index_loss(warmup);
  if (attends && c.cp > 1) {
    m.temporaries += s.context(indexes, indexes && c.mode().index_loss, !warmup);
  }
  if (ends && !warmup) {
    m.temporaries += s.logits() + number(1 + depths) * s.stream();
  }
  if (mtp && !warmup) {
    m.temporaries += 3 * s.stream();
    if (c.model.mtp_shared_components.latent_kv) m.temporaries += s.shared_key_gradient();
  }
  if (attends) m.workspace = workspace_bytes(c, indexes);
  if (attends) {
    const AttentionConfig& a = c.model.attention;
    m.tables = number(a.max_positions) * number(a.qk_rope_head_dim + a.indexer.rope_dim) *
               number(dtype_bytes(c.dtype));
    // Ranges of the rows over pools, and where pools begin.
    if (a.indexer.pools()) {
      m.tables +=
          number(m.in_flight * c.rows()) * (2 + number(c.cp) / number(a.indexer.pool_size)) * kI32;
    }
    // Positions of the rows, order of the gathered keys and its inverse.
    if (c.cp > 1) m.tables += number(m.in_flight * c.rows()) * (1 + 2 * number(c.cp)) * kI64;
  }
  return m;
}

}  // namespace winnow::plan
