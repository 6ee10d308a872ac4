#include "attention/config.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace winnow::attention {
namespace {

// Far above any model; keeps every product of two sizes inside 64 bit.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;

// The rules of the options under "attention.".
class Checker {
 public:
  explicit Checker(Rules& rules) : rules_(rules) {}

  // Whether it is a size at all, so that other rules may count with it.
  bool size(const char* option, std::int64_t value, std::int64_t least = 1) {
    const bool kept = value >= least && value <= kMaxSize;
    require(kept, option, value, std::clamp(value, least, kMaxSize), "must be from {} to {}", least,
            kMaxSize);
    return kept;
  }
  void positive(const char* option, double value, double instead) {
    require(std::isfinite(value) && value > 0, option, value, instead,
            "must be positive and finite");
  }
  void even(const char* option, std::int64_t value) {
    require(value % 2 == 0, option, value, value + 1, "must be even, since RoPE turns pairs");
  }
  // heads * dim is the width of a projection.
  void width(const char* heads_option, std::int64_t heads, const char* dim_option,
             std::int64_t dim) {
    if (dim < 1) return;
    rules_.require(heads <= kMaxSize / dim,
                   fmt::format("attention.{} * attention.{}", heads_option, dim_option),
                   fmt::format("{} * {}", heads, dim),
                   fmt::format("attention.{} {}", heads_option, kMaxSize / dim),
                   "must be at most {}", kMaxSize);
  }
  template <class Value, class Instead, class... A>
  void require(bool kept, const char* option, const Value& value, const Instead& instead,
               fmt::format_string<A...> rule, A&&... arguments) {
    if (kept) return;
    rules_.require(false, std::string("attention.") + option, value, instead, rule,
                   std::forward<A>(arguments)...);
  }

 private:
  Rules& rules_;
};

std::int64_t power_of_two_below(std::int64_t value) {
  std::int64_t power = 1;
  while (power * 2 <= value) power *= 2;
  return power;
}

bool power_of_two(std::int64_t value) { return (value & (value - 1)) == 0; }

void check_pools(const IndexerConfig& c, bool topk, Checker& rules) {
  constexpr std::int64_t kMostPool = 4096;
  const bool size = c.pool_size >= 1 && c.pool_size <= kMostPool;
  rules.require(size, "indexer.pool_size", c.pool_size,
                std::clamp<std::int64_t>(c.pool_size, 1, kMostPool), "must be from 1 to {}",
                kMostPool);
  if (size && topk) {
    rules.require(c.topk % c.pool_size == 0, "indexer.topk", c.topk,
                  multiple_above(c.topk, c.pool_size),
                  "must be a multiple of attention.indexer.pool_size = {}", c.pool_size);
  }
  if (!c.hf_scoring) return;
  constexpr char kOption[] = "indexer.hf_scoring";
  rules.require(c.pools(), kOption, "", false, "needs attention.indexer.pool_size above 1");
  rules.require(c.weights_output == OutputPrecision::kBf16, kOption, "", false,
                "needs attention.indexer.weights_output \"bf16\"");
  rules.require(c.relu, kOption, "", false, "needs attention.indexer.relu");
  rules.require(c.precision == SelectionPrecision::kFull, kOption, "", false,
                "needs attention.indexer.precision \"full\"");
}

void check_indexer(const AttentionConfig& config, Checker& rules) {
  const IndexerConfig& c = config.indexer;
  const bool heads = rules.size("indexer.index_heads", c.index_heads);
  const bool dim = rules.size("indexer.index_dim", c.index_dim);
  if (heads && dim) {
    rules.width("indexer.index_heads", c.index_heads, "indexer.index_dim", c.index_dim);
  }
  check_pools(c, rules.size("indexer.topk", c.topk), rules);
  if (rules.size("indexer.rope_dim", c.rope_dim, 0)) rules.even("indexer.rope_dim", c.rope_dim);
  if (dim) {
    rules.require(c.index_dim >= c.rope_dim, "indexer.index_dim", c.index_dim, c.rope_dim,
                  "must be at least attention.indexer.rope_dim = {}", c.rope_dim);
    rules.require(!c.hadamard || power_of_two(c.index_dim), "indexer.index_dim", c.index_dim,
                  power_of_two_below(c.index_dim),
                  "must be a power of two with attention.indexer.hadamard");
  }
  const std::string missing = missing_for_precision(c, DType::kF32, AttentionMode::kSparse);
  rules.require(missing.empty(), "indexer.precision", "", "\"full\"", "\"{}\" needs {}",
                precision_name(c.precision), missing);
  if (c.mode == IndexerMode::kStandard) {
    rules.positive("indexer.k_norm_epsilon", c.k_norm_epsilon, 1e-6);
    return;
  }
  rules.require(config.kind == AttentionKind::kGqa, "indexer.mode", "\"mla\"", "\"standard\"",
                "\"simplified\" needs attention.kind \"gqa\"");
  rules.require(c.index_heads == 1, "indexer.index_heads", c.index_heads, 1,
                "must be 1 with mode \"simplified\"");
  rules.require(!c.relu, "indexer.relu", "", false, "must be false with mode \"simplified\"");
  rules.require(!c.hadamard, "indexer.hadamard", "", false,
                "must be false with mode \"simplified\"");
}

}  // namespace

const char* precision_name(SelectionPrecision precision) {
  if (precision == SelectionPrecision::kFull) return "full";
  return precision == SelectionPrecision::kMxfp8 ? "mxfp8" : "e4m3";
}

std::string missing_for_precision(const IndexerConfig& config, DType dtype, AttentionMode mode) {
  std::string missing;
  if (config.precision == SelectionPrecision::kFull) return missing;
  const bool mxfp8 = config.precision == SelectionPrecision::kMxfp8;
  const auto need = [&](bool there, const std::string& sentence) {
    if (!there) missing += (missing.empty() ? "" : "; ") + sentence;
  };
  if (mxfp8) {
    need(config.index_dim % 32 == 0,
         fmt::format("index_dim to be a multiple of 32, got {}", config.index_dim));
    need(!config.pools(), fmt::format("pool_size 1, got {}", config.pool_size));
  } else {
    need(config.pools(), fmt::format("pool_size above 1, got {}", config.pool_size));
    need(power_of_two(config.index_dim),
         fmt::format("index_dim to be a power of two, got {}", config.index_dim));
    need(!config.hadamard, "hadamard to be false: it rotates by itself");
  }
  need(dtype == DType::kF32, fmt::format("a model of dtype f32, got {}", dtype_name(dtype)));
  need(!mxfp8 || mode != AttentionMode::kWarmup,
       "the sparse loss: the dense loss of a warm-up reads scores that are not quantised");
  return missing;
}

double AttentionConfig::softmax_scale() const {
  return 1 / std::sqrt(static_cast<double>(qk_nope_head_dim + qk_rope_head_dim));
}

void check(const AttentionConfig& c, Rules& all) {
  Checker rules(all);
  const bool mla = c.kind == AttentionKind::kMla;
  rules.size("hidden_size", c.hidden_size);
  const bool heads = rules.size("heads", c.heads);
  const bool nope = rules.size("qk_nope_head_dim", c.qk_nope_head_dim, mla ? 1 : 0);
  const bool rope = rules.size("qk_rope_head_dim", c.qk_rope_head_dim, 0);
  const bool value = rules.size("v_head_dim", c.v_head_dim);
  if (rope) rules.even("qk_rope_head_dim", c.qk_rope_head_dim);
  const std::int64_t head_dim = nope && rope ? c.qk_nope_head_dim + c.qk_rope_head_dim : 0;
  if (nope && rope) {
    rules.require(head_dim >= 1, "qk_nope_head_dim + attention.qk_rope_head_dim", head_dim, 1,
                  "must be at least 1");
  }
  if (heads) {
    rules.width("heads", c.heads, "qk_nope_head_dim + qk_rope_head_dim", head_dim);
    rules.width("heads", c.heads, "qk_nope_head_dim + v_head_dim",
                nope && value ? c.qk_nope_head_dim + c.v_head_dim : 0);
  }
  if (mla) {
    rules.size("q_lora_rank", c.q_lora_rank, 0);
    const bool latent = rules.size("kv_lora_rank", c.kv_lora_rank);
    if (heads && latent && rope) {
      rules.width("heads", c.heads, "kv_lora_rank + qk_rope_head_dim", c.dim_qk());
    }
    rules.positive("latent_norm_epsilon", c.latent_norm_epsilon, 1e-6);
  } else if (rules.size("kv_heads", c.kv_heads) && heads) {
    rules.require(
        c.heads % c.kv_heads == 0, "heads", c.heads,
        fmt::format("attention.kv_heads {}", divisor_below(c.heads, std::min(c.heads, c.kv_heads))),
        "must be a multiple of attention.kv_heads = {}", c.kv_heads);
  }
  rules.size("max_positions", c.max_positions);
  check_indexer(c, rules);
  if (c.rotates()) rules.positive("rope_theta", c.rope_theta, 1e4);
}

void validate(const AttentionConfig& config) {
  Rules strict;
  check(config, strict);
}

}  // namespace winnow::attention
