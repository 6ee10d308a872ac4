#include "model/transformer.h"

#include <cmath>

#include "base/check.h"
#include "model/initialise.h"
#include "model/network.h"
#include "nn/embedding.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

constexpr char kName[] = "transformer";

const ModelConfig& checked(const ModelConfig& config) {
  validate(config);
  if (config.sharing.topk_freq > 1 || config.mtp_depths > 0) {
    fail(Status::kUnsupported, kName,
         "models with topk_freq above 1 or with mtp_depths cannot be built yet");
  }
  return config;
}

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

void check_batch(const Batch& batch, const ModelConfig& config, bool with_targets) {
  const auto rows = static_cast<std::int64_t>(batch.tokens.size());
  const auto check_rows = [&](const char* name, std::size_t size) {
    WINNOW_CHECK(kName, static_cast<std::int64_t>(size) == rows,
                 "batch.{} must have one entry per token, {}, got {}", name, rows, size);
  };
  WINNOW_CHECK(kName, rows >= 1, "a batch needs at least one row, got {}", rows);
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

attention::Rows rows_of(const Batch& batch) {
  const std::int64_t rows = batch.ranges.rows();
  attention::Rows view;
  view.positions = batch.positions;
  view.starts = make_tensor(batch.ranges.starts.data(), DType::kI32, {rows});
  view.ends = make_tensor(batch.ranges.ends.data(), DType::kI32, {rows});
  return view;
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
                                             fmt::format("model.layers.{}.", n), dtype));
  }
  head = std::make_unique<OutputHead>(config, embedding, parameters, dtype);
  caches.resize(blocks.size());
  streams.resize(blocks.size() + 1);

  constexpr double kDeviation = 0.02;
  const double residual = kDeviation / std::sqrt(2 * static_cast<double>(config.layers));
  for (const std::unique_ptr<Parameter>& p : parameters.all()) {
    if (p->value.view().rank == 1) {
      fill_constant(*p, ends_with(p->name, ".bias") ? 0 : 1);
    } else {
      const bool into_residual =
          ends_with(p->name, "o_proj.weight") || ends_with(p->name, "down_proj.weight");
      fill_normal(*p, into_residual ? residual : kDeviation, seed);
    }
  }
}

Tensor Transformer::Network::forward(std::span<const std::int32_t> tokens,
                                     const attention::Rows& rows,
                                     const attention::LayerOptions& options,
                                     std::vector<attention::KeyCache>& into,
                                     std::vector<attention::LayerResult>* results) {
  const std::int64_t hidden = config.attention.hidden_size;
  nn::embedding(embedding.value, tokens, streams[0].fit(dtype, {rows.count(), hidden}));
  selected = options.mode == AttentionMode::kSparse ||
             (options.mode == AttentionMode::kWarmup && options.measure_selection);
  for (std::size_t n = 0; n < blocks.size(); ++n) {
    const bool last = n + 1 == blocks.size();
    Tensor y;  // the last block of a warm-up ends with its indexer's loss
    if (!last || options.mode != AttentionMode::kWarmup) {
      y = streams[n + 1].fit(dtype, {rows.count(), hidden});
    }
    const attention::LayerResult result =
        blocks[n]->forward(streams[n], rows, options, into[n], memory, y);
    if (results != nullptr) results->push_back(result);
    if (last) return y;
  }
  return {};
}

void Transformer::Network::backward(std::span<const std::int32_t> tokens,
                                    const attention::Rows& rows,
                                    const std::vector<attention::KeyCache>& from) {
  for (std::size_t n = blocks.size(); n-- > 0;) {
    blocks[n]->backward(streams[n], rows, from[n], d_stream, memory);
  }
  nn::embedding_backward(tokens, d_stream, embedding.grad);
}

Transformer::Transformer(const ModelConfig& config, DType dtype, std::uint64_t seed)
    : network_(std::make_unique<Network>(config, dtype, seed)) {}
Transformer::~Transformer() = default;
Transformer::Transformer(Transformer&&) noexcept = default;
Transformer& Transformer::operator=(Transformer&&) noexcept = default;

const ModelConfig& Transformer::config() const { return network_->config; }
ParameterList& Transformer::parameters() { return network_->parameters; }

StepResult Transformer::step(const Batch& batch, const StepOptions& options) {
  Network& net = *network_;
  check_batch(batch, net.config, true);
  const bool warmup = options.mode == AttentionMode::kWarmup;
  WINNOW_CHECK(kName, !options.measure_selection || options.mode != AttentionMode::kDense,
               "measure_selection needs a mode in which the indexer runs, got dense");

  attention::LayerOptions layer;
  layer.mode = options.mode;
  layer.index_loss = options.mode == AttentionMode::kSparse && options.index_loss_scale != 0;
  layer.index_gradient = options.backward && (layer.index_loss || warmup);
  layer.d_kl = options.index_loss_scale;
  layer.measure_selection = options.measure_selection;
  layer.reuse_selection = net.frozen;

  const attention::Rows rows = rows_of(batch);
  for (attention::KeyCache& cache : net.caches) {
    cache.fit(net.config.attention, net.dtype, rows.count());
  }
  std::vector<attention::LayerResult> results;
  const Tensor x = net.forward(batch.tokens, rows, layer, net.caches, &results);

  StepResult result;
  for (const attention::LayerResult& r : results) {
    if (layer.index_loss || warmup) result.index_kl.push_back(r.index_kl);
    if (options.measure_selection) result.attention_mass_caught.push_back(r.attention_mass_caught);
  }
  for (const std::int32_t target : batch.targets) result.tokens += target >= 0 ? 1 : 0;
  if (warmup) return result;

  Tensor d_x;
  if (options.backward) d_x = net.d_stream.fit(net.dtype, {x.shape[0], x.shape[1]});
  result.nll = net.head->loss(x, batch.targets, options.loss_scale, d_x);
  if (options.backward) net.backward(batch.tokens, rows, net.caches);
  return result;
}

Array Transformer::log_probabilities(const Batch& batch, AttentionMode mode) {
  Network& net = *network_;
  check_batch(batch, net.config, false);
  WINNOW_CHECK(kName, mode != AttentionMode::kWarmup,
               "log-probabilities need the mode dense or sparse, got warm-up");
  attention::LayerOptions layer;
  layer.mode = mode;
  layer.reuse_selection = net.frozen;
  const attention::Rows rows = rows_of(batch);
  for (attention::KeyCache& cache : net.caches) {
    cache.fit(net.config.attention, net.dtype, rows.count());
  }
  const Tensor x = net.forward(batch.tokens, rows, layer, net.caches);
  Array result(net.dtype, {rows.count(), net.config.vocab_size});
  net.head->log_probabilities(x, result);
  return result;
}

std::vector<Tensor> Transformer::selections() const {
  std::vector<Tensor> all;
  if (!network_->selected) return all;
  for (const std::unique_ptr<Block>& block : network_->blocks) all.push_back(block->selection());
  return all;
}

void Transformer::freeze_selection(bool frozen) { network_->frozen = frozen; }

}  // namespace winnow::model
