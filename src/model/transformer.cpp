#include "model/transformer.h"

#include <algorithm>
#include <cstring>

#include "base/arithmetic.h"
#include "base/check.h"
#include "model/network.h"
#include "nn/embedding.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

constexpr char kName[] = "transformer";

void check_batch(const Batch& batch, const ModelConfig& config, bool with_targets) {
  const auto rows = static_cast<std::int64_t>(batch.tokens.size());
  const auto check_rows = [&](const char* name, std::size_t size) {
    WINNOW_CHECK(kName, static_cast<std::int64_t>(size) == rows,
                 "batch.{} must have one entry per token, {}, got {}", name, rows, size);
  };
  WINNOW_CHECK(kName, rows >= 1, "a batch needs at least one row, got {}", rows);
  WINNOW_CHECK(kName, !batch.context || rows == batch.context->rows(),
               "a batch with context must hold this rank's {} rows (cut_batch), got {}",
               batch.context->rows(), rows);
  if (with_targets) check_rows("targets", batch.targets.size());
  check_rows("positions", batch.positions.size());
  check_rows("ranges.starts", batch.ranges.starts.size());
  check_rows("ranges.ends", batch.ranges.ends.size());
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto at = static_cast<std::size_t>(i);
    WINNOW_CHECK(kName, batch.tokens[at] >= 0 && batch.tokens[at] < config.vocab_size,
                 "tokens must be from 0 to {}, got {} in row {}", config.vocab_size - 1,
                 batch.tokens[at], i);
    WINNOW_CHECK(
        kName, !with_targets || (batch.targets[at] >= -1 && batch.targets[at] < config.vocab_size),
        "targets must be -1 or from 0 to {}, got {} in row {}", config.vocab_size - 1,
        batch.targets[at], i);
    WINNOW_CHECK(kName,
                 batch.positions[at] >= 0 && batch.positions[at] < config.attention.max_positions,
                 "positions must be from 0 to {}, got {} in row {}",
                 config.attention.max_positions - 1, batch.positions[at], i);
  }
}

void check_options(const StepOptions& options, const ModelConfig& config) {
  WINNOW_CHECK(kName, !options.measure_selection || options.mode != AttentionMode::kDense,
               "measure_selection needs a mode in which the indexer runs, got dense");
  const auto scales = static_cast<std::int64_t>(options.mtp_loss_scales.size());
  WINNOW_CHECK(kName, scales == 0 || scales == config.mtp_depths,
               "mtp_loss_scales must have one entry per depth, {}, or none, got {}",
               config.mtp_depths, scales);
  validate(options.recompute, config);
}

void check_mtp_tokens(const Batch& batch, std::size_t depths, const ModelConfig& config,
                      bool with_targets) {
  WINNOW_CHECK(kName, batch.mtp_tokens.size() >= depths && batch.mtp_targets.size() >= depths,
               "a batch for {} depths needs their tokens (add_mtp_tokens), got those of {}", depths,
               std::min(batch.mtp_tokens.size(), batch.mtp_targets.size()));
  for (std::size_t d = 0; d < depths; ++d) {
    for (const auto* list : {&batch.mtp_tokens[d], &batch.mtp_targets[d]}) {
      const bool tokens = list == &batch.mtp_tokens[d];
      if (!tokens && !with_targets) continue;
      WINNOW_CHECK(kName, list->size() == batch.tokens.size(),
                   "batch.mtp_{}[{}] must have one entry per token, {}, got {}",
                   tokens ? "tokens" : "targets", d, batch.tokens.size(), list->size());
      for (const std::int32_t token : *list) {
        WINNOW_CHECK(kName, token >= (tokens ? 0 : -1) && token < config.vocab_size,
                     "batch.mtp_{}[{}] must be from {} to {}, got {}",
                     tokens ? "tokens" : "targets", d, tokens ? 0 : -1, config.vocab_size - 1,
                     token);
      }
    }
  }
}

IndexRuns indexers_so_far(const BlockMemory& memory) {
  return {memory.attention.selections, 0, memory.attention.index_seconds};
}

std::int64_t count_targets(const std::vector<std::int32_t>& targets) {
  return std::count_if(targets.begin(), targets.end(), [](std::int32_t t) { return t >= 0; });
}

// How many depths run the indexer of the repeated layer.
std::size_t mtp_calls_that_compute(const ModelConfig& config) {
  if (config.mtp_depths == 0 || !computes_indices(config.sharing, config.layers + 1)) return 0;
  return config.mtp_shared_components.sparse_attention_index
             ? 1
             : static_cast<std::size_t>(config.mtp_depths);
}

// By layer that owns an indexer, in the order of index_layers; depths add up.
std::vector<double> index_kl_of(const ModelConfig& config,
                                const std::vector<attention::LayerResult>& results) {
  std::vector<double> kl;
  const auto layers = static_cast<std::size_t>(config.layers);
  for (std::size_t n = 0; n < results.size(); ++n) {
    const auto number = static_cast<std::int64_t>(std::min(n, layers)) + 1;
    if (!computes_indices(config.sharing, number)) continue;
    if (n > layers) {
      kl.back() += results[n].index_kl;
    } else {
      kl.push_back(results[n].index_kl);
    }
  }
  return kl;
}

// A pass without backward keeps nothing but the selections.
void begin(const Batch& batch, const StepOptions& options, const ModelConfig& config,
           PassState& state) {
  state.batch = &batch;
  state.context = batch.context;
  state.rows = attention::rows_of(batch.positions, batch.ranges);
  state.rows.context = batch.context.get();
  if (state.context) {
    state.context->check_agreement();
    state.context_version = state.context->tables().version();
  }
  state.capacity = state.rows.keys();
  const attention::IndexerConfig& indexer = config.attention.indexer;
  if (indexer.pools() && options.mode != AttentionMode::kDense) {
    state.pools.whole(batch.ranges, batch.cu_seqlens, batch.spans, indexer.pool_size);
    state.rows.pools = state.pools.view();
  }
  state.options = options;
  const bool backward = options.backward && options.mode != AttentionMode::kWarmup;
  state.options.backward = backward;
  state.recompute = options.recompute;
  if (!backward) {
    state.recompute = {};
    state.recompute.full = true;
  }
  state.ran = false;
  state.depths_ran = 0;
  state.sharing = attention::ForwardSharing(config.sharing);
  const auto depths = static_cast<std::size_t>(config.mtp_depths);
  state.calls.resize(static_cast<std::size_t>(config.layers) + depths);
  state.depths.resize(depths);
  state.d_normed.resize(1 + depths);
  state.layer = {};
  state.layer.mode = options.mode;
  state.layer.index_loss = options.mode == AttentionMode::kSparse && options.index_loss_scale != 0;
  state.layer.index_gradient =
      options.backward && (state.layer.index_loss || options.mode == AttentionMode::kWarmup);
  state.layer.d_kl = options.index_loss_scale;
  state.layer.measure_selection = options.measure_selection;
}

}  // namespace

void add_mtp_tokens(Batch& batch, std::int64_t depths) {
  const std::size_t rows = batch.tokens.size();
  // The target of the row `ahead` places on, if that lies in the same sequence.
  const auto target = [&](std::size_t row, std::size_t ahead) {
    if (ahead >= rows - row) return -1;
    const std::size_t at = row + ahead;
    const bool same =
        batch.positions[at] == batch.positions[row] + static_cast<std::int32_t>(ahead);
    return same ? batch.targets[at] : -1;
  };
  batch.mtp_tokens.assign(static_cast<std::size_t>(depths), {});
  batch.mtp_targets.assign(static_cast<std::size_t>(depths), {});
  for (std::size_t depth = 0; depth < batch.mtp_tokens.size(); ++depth) {
    for (std::size_t row = 0; row < rows; ++row) {
      const std::int32_t read = target(row, depth);
      batch.mtp_tokens[depth].push_back(std::max(read, 0));
      batch.mtp_targets[depth].push_back(read < 0 ? -1 : target(row, depth + 1));
    }
  }
}

Pass::Pass() : state_(std::make_unique<PassState>()) {}
Pass::~Pass() = default;
Pass::Pass(Pass&&) noexcept = default;
Pass& Pass::operator=(Pass&&) noexcept = default;

std::vector<Tensor> Pass::selections() const {
  std::vector<Tensor> all;
  for (std::size_t n = 0; n < state_->selecting_layers(); ++n) {
    all.push_back(state_->calls[n].selected.topk_indices);
  }
  return all;
}

std::vector<bool> Pass::certificates() const {
  std::vector<bool> all;
  for (std::size_t n = 0; n < state_->selecting_layers(); ++n) {
    all.push_back(state_->calls[n].selected.rows_nonempty);
  }
  return all;
}

Transformer::Transformer(const ModelConfig& config, DType dtype, std::uint64_t seed)
    : network_(std::make_unique<Network>(config, dtype, seed)) {}
Transformer::~Transformer() = default;
Transformer::Transformer(Transformer&&) noexcept = default;
Transformer& Transformer::operator=(Transformer&&) noexcept = default;

const ModelConfig& Transformer::config() const { return network_->config; }
ParameterList& Transformer::parameters() { return network_->parameters; }

StepResult Transformer::step(const Batch& batch, const StepOptions& options) {
  const double before = counted_flops();
  StepResult result = forward(batch, options, network_->own_pass);
  if (network_->own_pass.state_->ran) {
    const IndexRuns again = backward(network_->own_pass);
    result.index_runs.replay = again.replay;
    result.index_runs.seconds += again.seconds;
  }
  result.flops = counted_flops() - before;
  return result;
}

StepResult Transformer::forward(const Batch& batch, const StepOptions& options, Pass& pass) {
  Network& net = *network_;
  PassState& state = *pass.state_;
  check_batch(batch, net.config, true);
  check_options(options, net.config);
  const bool warmup = options.mode == AttentionMode::kWarmup;
  begin(batch, options, net.config, state);
  state.layer.hold_selection = net.frozen;
  // In the warm-up depths run for their indexers' losses alone, and the last call ends with one.
  std::size_t depths = options.mtp_loss_scales.size();
  if (warmup) depths = mtp_calls_that_compute(net.config);
  check_mtp_tokens(batch, depths, net.config, !warmup);

  const IndexRuns before = indexers_so_far(net.memory);
  const double flops_before = counted_flops();
  const attention::ForwardSharing::Scope scope(state.sharing);
  std::vector<attention::LayerResult> results;
  const std::int64_t rows = state.rows.count(), hidden = net.config.attention.hidden_size;
  const Tensor x = net.run_layers(batch.tokens, state, !warmup || depths > 0, results);
  StepResult result;
  const auto loss = [&](std::size_t end, const Tensor& normed,
                        std::span<const std::int32_t> targets, double scale) {
    Tensor d_normed;
    if (options.backward) d_normed = state.d_normed[end].fit(net.dtype, {rows, hidden});
    return net.head->loss(normed, targets, scale, d_normed);
  };
  if (!x.empty()) {
    net.head->normalise(x, state.normed.fit(net.dtype, {rows, hidden}),
                        state.scale.fit(net.dtype, {rows}));
  }
  if (!warmup) result.nll = loss(0, state.normed, batch.targets, options.loss_scale);
  for (std::size_t d = 0; d < depths; ++d) {
    net.run_depth(d, state, !warmup || d + 1 < depths, results);
    if (warmup) continue;
    result.mtp_nll.push_back(
        loss(d + 1, state.depths[d].normed, batch.mtp_targets[d], options.mtp_loss_scales[d]));
    result.mtp_tokens.push_back(count_targets(batch.mtp_targets[d]));
  }

  result.tokens = count_targets(batch.targets);
  const IndexRuns after = indexers_so_far(net.memory);
  result.index_runs = {after.forward - before.forward, 0, after.seconds - before.seconds};
  if (state.layer.index_loss || warmup) result.index_kl = index_kl_of(net.config, results);
  for (const attention::LayerResult& r : results) {
    if (options.measure_selection) result.attention_mass_caught.push_back(r.attention_mass_caught);
  }
  result.flops = counted_flops() - flops_before;
  state.depths_ran = depths;
  state.ran = options.backward && !warmup;
  return result;
}

IndexRuns Transformer::backward(Pass& pass) {
  Network& net = *network_;
  PassState& state = *pass.state_;
  WINNOW_CHECK(kName, state.ran, "a pass goes backward once, after a forward with backward set");
  state.ran = false;
  WINNOW_CHECK(kName, !state.context || state.context->tables().version() == state.context_version,
               "the context tables of a pass were refreshed before its backward, which still needs "
               "them: run it first, or use tables of its own for every pass in flight");
  const IndexRuns before = indexers_so_far(net.memory);
  const std::int64_t rows = state.rows.count(), hidden = net.config.attention.hidden_size;
  const std::int64_t keys = state.rows.keys();
  const Tensor& d_stream = state.d_stream.fit(net.dtype, {rows, hidden});
  if (state.depths_ran > 0 && net.config.mtp_shared_components.latent_kv) {
    const Tensor& d_keys =
        state.d_shared_keys.fit(net.dtype, {keys, 1, net.config.attention.dim_qk()});
    std::memset(d_keys.data, 0,
                static_cast<std::size_t>(d_keys.elements() * dtype_bytes(net.dtype)));
  }
  for (std::size_t depth = state.depths_ran; depth-- > 0;) net.run_depth_backward(depth, state);
  net.head->normalise_backward(state.end, state.scale, state.d_normed[0], d_stream);
  for (std::size_t n = net.layers(); n-- > 0;) net.call_block_backward(n, state, d_stream);
  nn::embedding_backward(state.batch->tokens, d_stream, net.embedding.grad);
  const IndexRuns after = indexers_so_far(net.memory);
  return {0, after.forward - before.forward, after.seconds - before.seconds};
}

Array Transformer::log_probabilities(const Batch& batch, AttentionMode mode) {
  Network& net = *network_;
  check_batch(batch, net.config, false);
  WINNOW_CHECK(kName, mode != AttentionMode::kWarmup,
               "log-probabilities need the mode dense or sparse, got warm-up");
  PassState& state = *net.own_pass.state_;
  StepOptions options;
  options.mode = mode;
  options.backward = false;
  begin(batch, options, net.config, state);
  state.layer.hold_selection = net.frozen;
  const attention::ForwardSharing::Scope scope(state.sharing);
  std::vector<attention::LayerResult> results;
  const Tensor x = net.run_layers(batch.tokens, state, true, results);
  Array result(net.dtype, {state.rows.count(), net.config.vocab_size});
  net.head->log_probabilities(x, result);
  return result;
}

std::vector<Tensor> Transformer::selections() const { return network_->own_pass.selections(); }

std::vector<bool> Transformer::certificates() const { return network_->own_pass.certificates(); }

void Transformer::freeze_selection(bool frozen) { network_->frozen = frozen; }

}  // namespace winnow::model
