#include "model/network.h"

#include <cmath>

#include "base/check.h"
#include "model/initialise.h"
#include "nn/embedding.h"

namespace winnow::model {
namespace {

using attention::ForwardSharing;

constexpr char kName[] = "transformer";

const ModelConfig& checked(const ModelConfig& config) {
  validate(config);
  return config;
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

Transformer::Network::Network(const ModelConfig& model_config, DType model_dtype,
                              std::uint64_t seed)
    : config(checked(model_config)),
      dtype(model_dtype),
      ropes(config.attention, dtype),
      embedding(parameters.add("model.embed_tokens.weight",
                               {config.vocab_size, config.attention.hidden_size}, dtype)) {
  WINNOW_CHECK(kName, dtype == DType::kF32 || dtype == DType::kF64,
               "dtype must be f32 or f64, got {}", dtype_name(dtype));
  for (std::int64_t n = 0; n < config.layers; ++n) {
    blocks.push_back(std::make_unique<Block>(config, ropes, parameters,
                                             fmt::format("model.layers.{}.", n), dtype,
                                             computes_indices(config.sharing, n + 1)));
  }
  if (config.mtp_depths > 0) mtp.emplace(config, ropes, embedding, parameters, dtype);
  head = std::make_unique<OutputHead>(config, embedding, parameters, dtype);

  constexpr double kDeviation = 0.02, kGateDeviation = 0.01;
  const double residual = kDeviation / std::sqrt(2 * static_cast<double>(config.layers));
  for (const std::unique_ptr<Parameter>& p : parameters.all()) {
    if (ends_with(p->name, "index_kpool_compress_ape")) {
      fill_constant(*p, 0);
    } else if (ends_with(p->name, "index_kpool_compress_gate")) {
      fill_normal(*p, kGateDeviation, seed);
    } else if (p->value.view().rank == 1) {
      fill_constant(*p, ends_with(p->name, ".bias") ? 0 : 1);
    } else {
      const bool into_residual =
          ends_with(p->name, "o_proj.weight") || ends_with(p->name, "down_proj.weight");
      fill_normal(*p, into_residual ? residual : kDeviation, seed);
    }
  }
}

Tensor Transformer::Network::run_layers(std::span<const std::int32_t> tokens, PassState& pass,
                                        bool to_the_end,
                                        std::vector<attention::LayerResult>& results) {
  const std::int64_t rows = pass.rows.count(), hidden = config.attention.hidden_size;
  nn::embedding(embedding.value, tokens, pass.calls[0].input.fit(dtype, {rows, hidden}));
  for (std::size_t n = 0; n < layers(); ++n) {
    const bool last = n + 1 == layers();
    Tensor y;
    if (!last) y = pass.calls[n + 1].input.fit(dtype, {rows, hidden});
    if (last && to_the_end) y = pass.end.fit(dtype, {rows, hidden});
    results.push_back(call_block(n, pass, y));
    if (last) return y;
  }
  return {};
}

void Transformer::Network::run_depth(std::size_t depth, PassState& pass, bool to_the_end,
                                     std::vector<attention::LayerResult>& results) {
  const std::int64_t rows = pass.rows.count(), hidden = config.attention.hidden_size;
  MtpActivations& kept = pass.depths[depth];
  MtpJoin& join = pass.recompute.full ? mtp_memory.lent : kept.join;
  const std::size_t n = layers() + depth;
  mtp->join(previous(depth, pass), pass.batch->mtp_tokens[depth], join);
  mtp->project(join, pass.calls[n].input.fit(dtype, {rows, hidden}));
  Tensor y;
  if (to_the_end) y = kept.output.fit(dtype, {rows, hidden});
  results.push_back(call_block(n, pass, y));
  if (to_the_end) mtp->normalise(kept);
}

void Transformer::Network::run_depth_backward(std::size_t depth, PassState& pass) {
  const std::size_t n = layers() + depth;
  const MtpActivations& kept = pass.depths[depth];
  const Tensor& before = previous(depth, pass);
  const std::vector<std::int32_t>& tokens = pass.batch->mtp_tokens[depth];
  mtp->normalise_backward(kept, pass.d_normed[depth + 1], pass.d_stream);
  call_block_backward(n, pass, pass.d_stream);
  if (pass.recompute.full) mtp->join(before, tokens, mtp_memory.lent);
  mtp->join_backward(before, tokens, pass.recompute.full ? mtp_memory.lent : kept.join,
                     pass.d_stream, pass.d_normed[depth], mtp_memory);
}

const Tensor& Transformer::Network::previous(std::size_t depth, const PassState& pass) const {
  return depth == 0 ? pass.normed.view() : pass.depths[depth - 1].normed.view();
}

attention::LayerResult Transformer::Network::call_block(std::size_t n, PassState& pass,
                                                        const Tensor& y) {
  BlockCall& call = pass.calls[n];
  ForwardSharing& sharing = pass.sharing;
  std::optional<ForwardSharing::Depth> repeated;
  if (is_depth(n)) repeated.emplace(sharing, number(n), static_cast<std::int64_t>(n - layers()));
  call.options = options_of(n, pass);
  call.cache = &cache_of(n, pass);
  call.cache->fit(config.attention, dtype, pass.capacity, block(n).owns_indexer());
  const BlockKept kept = kept_of(n, pass);
  const attention::LayerResult result =
      block(n).forward(call.input, pass.rows, call.options, kept, memory, y);

  const attention::Selection& selected = kept.attention.core.selected;
  const bool reuses = call.options.reuses_indices;
  call.selected = reuses || keeps_selection(n, pass) ? selected : attention::Selection();
  if (!selected.empty() && !reuses) sharing.publish(number(n), selected);
  if (n == layers() && config.mtp_shared_components.any()) {
    if (!selected.empty()) sharing.publish_selection(number(n), selected);
    sharing.publish_keys(number(n), *call.cache);
  }
  return result;
}

// The replay attends to what its first call attended to: an indexer runs again only where that
// selection was not kept.
void Transformer::Network::call_block_backward(std::size_t n, PassState& pass,
                                               const Tensor& d_stream) {
  BlockCall& call = pass.calls[n];
  const BlockKept kept = kept_of(n, pass);
  if (pass.recompute.any()) {
    attention::LayerOptions options = call.options;
    if (!call.selected.empty()) {
      options.reuses_indices = true;
      options.reused = call.selected;
    }
    call.cache->fit(config.attention, dtype, pass.capacity, block(n).owns_indexer());
    block(n).replay(call.input, pass.rows, options, pass.recompute, kept, memory);
  }
  const Tensor d_shared_keys = shares_keys(n) ? pass.d_shared_keys.view() : Tensor();
  block(n).backward(call.input, pass.rows, call.options, kept, d_stream, d_shared_keys, memory);
}

attention::LayerOptions Transformer::Network::options_of(std::size_t n,
                                                         const PassState& pass) const {
  const MtpSharedComponents& shared = config.mtp_shared_components;
  const bool later = n > layers();  // a depth after the first
  const bool from_first = later && shared.sparse_attention_index;
  attention::LayerOptions options = pass.layer;
  options.shared_keys = later && shared.latent_kv;
  options.reuses_indices = from_first || !computes_indices(config.sharing, number(n));
  if (options.reuses_indices && options.selects()) {
    options.reused =
        from_first ? pass.sharing.shared_selection(number(n)) : pass.sharing.reused_by(number(n));
  }
  return options;
}

attention::KeyCache& Transformer::Network::cache_of(std::size_t n, PassState& pass) {
  if (n > layers() && shares_keys(n)) return pass.sharing.shared_keys(number(n));
  const bool own = !pass.recompute.full || pass.keep_caches || shares_keys(n);
  return own ? pass.calls[n].kept.attention.cache : memory.lent.attention.cache;
}

BlockKept Transformer::Network::kept_of(std::size_t n, PassState& pass) {
  BlockCall& call = pass.calls[n];
  return place(pass.recompute, *call.cache, keeps_selection(n, pass), call.kept, memory.lent);
}

bool Transformer::Network::keeps_selection(std::size_t n, const PassState& pass) const {
  return !pass.recompute.replays_selection() || pass.recompute.reuse_checkpoint_topk ||
         !pass.options.backward || frozen || has_consumers(n);
}

// Whether calls after n attend to the selection of n.
bool Transformer::Network::has_consumers(std::size_t n) const {
  const std::int64_t last = config.layers + (mtp ? 1 : 0);
  if (n == layers() && config.mtp_shared_components.sparse_attention_index) return true;
  return !is_depth(n) && number(n) < last &&
         index_source(config.sharing, number(n) + 1) <= number(n);
}

bool Transformer::Network::shares_keys(std::size_t n) const {
  return is_depth(n) && config.mtp_shared_components.latent_kv;
}

}  // namespace winnow::model
