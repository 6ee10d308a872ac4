#include "model/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/numbers.h"
#include "model/initialise.h"
#include "model/network.h"

namespace winnow::model {
namespace {

constexpr char kName[] = "generate";

// Chooses tokens by options; keeps its memory between tokens.
class Sampler {
 public:
  explicit Sampler(const GenerateOptions& options) : options_(options) {}

  std::int32_t choose(std::span<const float> log_probabilities) {
    for (const float x : log_probabilities) {
      if (std::isnan(x)) {
        fail(Status::kCorrupt, kName,
             "log-probabilities must be numbers, got NaN: weights of the model are not finite");
      }
    }
    const auto best = std::max_element(log_probabilities.begin(), log_probabilities.end());
    if (options_.temperature == 0) {  // max_element gives the first of equals
      return static_cast<std::int32_t>(best - log_probabilities.begin());
    }
    weights_.resize(log_probabilities.size());
    for (std::size_t t = 0; t < weights_.size(); ++t) {
      weights_[t] =
          std::exp((static_cast<double>(log_probabilities[t]) - static_cast<double>(*best)) /
                   options_.temperature);
    }
    tokens_.resize(weights_.size());
    std::iota(tokens_.begin(), tokens_.end(), 0);
    std::size_t kept = tokens_.size();
    double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    if (options_.top_p < 1) {
      std::sort(tokens_.begin(), tokens_.end(), [&](std::int32_t a, std::int32_t b) {
        return weight(a) != weight(b) ? weight(a) > weight(b) : a < b;
      });
      const double wanted = options_.top_p * total;
      total = 0;
      for (kept = 0; kept < tokens_.size() && (kept == 0 || total < wanted); ++kept) {
        total += weight(tokens_[kept]);
      }
    }
    // 53 random bits of the stream `seed`, number `drawn_`.
    const double uniform =
        std::ldexp(static_cast<double>(random_bits(options_.seed, drawn_++) >> 11), -53);
    double rest = uniform * total;
    for (std::size_t i = 0; i + 1 < kept; ++i) {
      rest -= weight(tokens_[i]);
      if (rest < 0) return tokens_[i];
    }
    return tokens_[kept - 1];
  }

 private:
  double weight(std::int32_t token) const { return weights_[static_cast<std::size_t>(token)]; }

  const GenerateOptions& options_;
  std::uint64_t drawn_ = 0;
  std::vector<double> weights_;
  std::vector<std::int32_t> tokens_;
};

void check_options(const GenerateOptions& o) {
  WINNOW_CHECK(kName, o.max_tokens >= 0, "max_tokens must be at least 0, got {}", o.max_tokens);
  WINNOW_CHECK(kName, std::isfinite(o.temperature) && o.temperature >= 0,
               "temperature must be finite and at least 0, got {}", o.temperature);
  WINNOW_CHECK(kName, o.top_p > 0 && o.top_p <= 1, "top_p must be above 0 and at most 1, got {}",
               o.top_p);
}

}  // namespace

Decoder::Decoder(Transformer& model, attention::AttentionMode mode, std::int64_t capacity)
    : model_(model), capacity_(capacity) {
  const Transformer::Network& net = *model.network_;
  WINNOW_CHECK(kName, mode != attention::AttentionMode::kWarmup,
               "mode must be dense or sparse, got warm-up");
  WINNOW_CHECK(kName, capacity >= 1 && capacity <= net.config.attention.max_positions,
               "prompt and generated tokens together must be from 1 to attention.max_positions = "
               "{}, got {}",
               net.config.attention.max_positions, capacity);
  PassState& state = *pass_.state_;
  state.capacity = capacity;
  state.keep_caches = true;
  state.options.backward = false;
  state.recompute.full = true;  // nothing but caches and selections is kept
  state.layer.mode = mode;
  state.sharing = attention::ForwardSharing(net.config.sharing);
  state.calls.resize(net.blocks.size());
  log_probabilities_ = Array(net.dtype, {1, net.config.vocab_size});
}

Tensor Decoder::read(std::span<const std::int32_t> tokens) {
  Transformer::Network& net = *model_.network_;
  const auto count = static_cast<std::int64_t>(tokens.size());
  WINNOW_CHECK(kName, count >= 1 && count <= capacity_ - length_,
               "a piece must be from 1 to the {} tokens that still fit, got {}",
               capacity_ - length_, count);
  positions_.resize(tokens.size());
  std::iota(positions_.begin(), positions_.end(), static_cast<std::int32_t>(length_));
  const RowRanges ranges = causal_ranges(count, length_);
  PassState& state = *pass_.state_;
  attention::Rows& rows = state.rows;
  rows = attention::rows_of(positions_, ranges);
  rows.first_key = length_;
  const std::int64_t pool_size = net.config.attention.indexer.pool_size;
  if (pool_size > 1) {
    state.pools.growing(length_, count, pool_size);
    rows.pools = state.pools.view();
  }
  const attention::ForwardSharing::Scope scope(state.sharing);
  std::vector<attention::LayerResult> results;
  const Tensor x = net.run_layers(tokens, state, true, results);
  length_ += count;
  net.head->log_probabilities(x.rows(count - 1, 1), log_probabilities_);
  return log_probabilities_.view().reshape({net.config.vocab_size});
}

std::vector<std::int32_t> generate(Transformer& model, std::span<const std::int32_t> prompt,
                                   const GenerateOptions& options) {
  check_options(options);
  WINNOW_CHECK(kName, !prompt.empty(), "the prompt needs at least one token, got {}",
               prompt.size());
  const std::int64_t most = model.config().attention.max_positions;
  const auto length = static_cast<std::int64_t>(prompt.size());
  WINNOW_CHECK(kName, length <= most && options.max_tokens <= most - length,
               "prompt and generated tokens together must be at most attention.max_positions = {}, "
               "got {} + {}",
               most, length, options.max_tokens);
  std::vector<std::int32_t> generated;
  if (options.max_tokens == 0) return generated;

  Decoder decoder(model, options.mode, length + options.max_tokens);
  Sampler sampler(options);
  std::vector<float> log_probabilities(static_cast<std::size_t>(model.config().vocab_size));
  std::span<const std::int32_t> next = prompt;
  while (static_cast<std::int64_t>(generated.size()) < options.max_tokens) {
    const Tensor row = decoder.read(next);
    for (std::size_t t = 0; t < log_probabilities.size(); ++t) {
      log_probabilities[t] =
          static_cast<float>(load_double(row.data, row.dtype, static_cast<std::int64_t>(t)));
    }
    generated.push_back(sampler.choose(log_probabilities));
    if (options.on_token && !options.on_token(generated.back(), log_probabilities)) break;
    next = std::span(generated).last(1);
  }
  return generated;
}

}  // namespace winnow::model
