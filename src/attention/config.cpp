#include "attention/config.h"

#include <cmath>

#include "base/check.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "config";
// Far above any model; keeps every product of two sizes inside 64 bit.
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;

void check_size(const char* option, std::int64_t value, std::int64_t least = 1) {
  WINNOW_CHECK(kName, value >= least && value <= kMaxSize,
               "attention.{} must be from {} to {}, got {}", option, least, kMaxSize, value);
}

void check_positive(const char* option, double value) {
  WINNOW_CHECK(kName, std::isfinite(value) && value > 0,
               "attention.{} must be positive and finite, got {}", option, value);
}

// heads * dim is the width of a projection.
void check_width(const char* heads_option, std::int64_t heads, const char* dim_option,
                 std::int64_t dim) {
  WINNOW_CHECK(kName, heads <= kMaxSize / dim,
               "attention.{} * attention.{} must be at most {}, got {} * {}", heads_option,
               dim_option, kMaxSize, heads, dim);
}

void check_even(const char* option, std::int64_t value) {
  WINNOW_CHECK(kName, value % 2 == 0, "attention.{} must be even, since RoPE turns pairs, got {}",
               option, value);
}

void validate_indexer(const AttentionConfig& config) {
  const IndexerConfig& c = config.indexer;
  check_size("indexer.index_heads", c.index_heads);
  check_size("indexer.index_dim", c.index_dim);
  check_width("indexer.index_heads", c.index_heads, "indexer.index_dim", c.index_dim);
  check_size("indexer.topk", c.topk);
  check_size("indexer.rope_dim", c.rope_dim, 0);
  check_even("indexer.rope_dim", c.rope_dim);
  WINNOW_CHECK(kName, c.index_dim >= c.rope_dim,
               "attention.indexer.index_dim must be at least attention.indexer.rope_dim = {}, got "
               "{}",
               c.rope_dim, c.index_dim);
  WINNOW_CHECK(kName, !c.hadamard || (c.index_dim & (c.index_dim - 1)) == 0,
               "attention.indexer.index_dim must be a power of two with "
               "attention.indexer.hadamard, got {}",
               c.index_dim);
  if (c.precision == SelectionPrecision::kMxfp8) {
    const std::string missing = missing_for_mxfp8(c, DType::kF32, AttentionMode::kSparse);
    WINNOW_CHECK(kName, missing.empty(), "attention.indexer.precision \"mxfp8\" needs {}", missing);
  }
  if (c.mode == IndexerMode::kStandard) {
    check_positive("indexer.k_norm_epsilon", c.k_norm_epsilon);
    return;
  }
  WINNOW_CHECK(kName, config.kind == AttentionKind::kGqa,
               "attention.indexer.mode \"simplified\" needs attention.kind \"gqa\", got \"mla\"");
  WINNOW_CHECK(kName, c.index_heads == 1,
               "attention.indexer.index_heads must be 1 with mode \"simplified\", got {}",
               c.index_heads);
  WINNOW_CHECK(kName, !c.relu, "attention.indexer.relu must be false with mode \"simplified\"");
  WINNOW_CHECK(kName, !c.hadamard,
               "attention.indexer.hadamard must be false with mode \"simplified\"");
}

}  // namespace

std::string missing_for_mxfp8(const IndexerConfig& config, DType dtype, AttentionMode mode) {
  std::string missing;
  const auto need = [&](bool there, const std::string& sentence) {
    if (!there) missing += (missing.empty() ? "" : "; ") + sentence;
  };
  need(config.index_dim % 32 == 0,
       fmt::format("index_dim to be a multiple of 32, got {}", config.index_dim));
  need(dtype == DType::kF32, fmt::format("a model of dtype f32, got {}", dtype_name(dtype)));
  need(mode != AttentionMode::kWarmup,
       "the sparse loss: the dense loss of a warm-up reads scores that are not quantised");
  return missing;
}

double AttentionConfig::softmax_scale() const {
  return 1 / std::sqrt(static_cast<double>(qk_nope_head_dim + qk_rope_head_dim));
}

void validate(const AttentionConfig& c) {
  const bool mla = c.kind == AttentionKind::kMla;
  check_size("hidden_size", c.hidden_size);
  check_size("heads", c.heads);
  check_size("qk_nope_head_dim", c.qk_nope_head_dim, mla ? 1 : 0);
  check_size("qk_rope_head_dim", c.qk_rope_head_dim, 0);
  check_size("v_head_dim", c.v_head_dim);
  check_even("qk_rope_head_dim", c.qk_rope_head_dim);
  const std::int64_t head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  WINNOW_CHECK(kName, head_dim >= 1,
               "attention.qk_nope_head_dim + attention.qk_rope_head_dim must be at least 1, got 0");
  check_width("heads", c.heads, "qk_nope_head_dim + qk_rope_head_dim", head_dim);
  check_width("heads", c.heads, "qk_nope_head_dim + v_head_dim", c.qk_nope_head_dim + c.v_head_dim);
  if (mla) {
    check_size("q_lora_rank", c.q_lora_rank, 0);
    check_size("kv_lora_rank", c.kv_lora_rank);
    check_width("heads", c.heads, "kv_lora_rank + qk_rope_head_dim",
                c.kv_lora_rank + c.qk_rope_head_dim);
    check_positive("latent_norm_epsilon", c.latent_norm_epsilon);
  } else {
    check_size("kv_heads", c.kv_heads);
    WINNOW_CHECK(kName, c.heads % c.kv_heads == 0,
                 "attention.heads must be a multiple of attention.kv_heads = {}, got {}",
                 c.kv_heads, c.heads);
  }
  check_size("max_positions", c.max_positions);
  validate_indexer(c);
  if (c.qk_rope_head_dim > 0 || c.indexer.rope_dim > 0) check_positive("rope_theta", c.rope_theta);
}

}  // namespace winnow::attention
