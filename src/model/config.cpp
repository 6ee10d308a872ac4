#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "model/json_reader.h"

namespace winnow::model {
namespace {

using attention::AttentionConfig;
using attention::AttentionKind;
using attention::IndexerConfig;
using attention::IndexerMode;
using attention::OutputPrecision;
using attention::precision_name;
using attention::SelectionPrecision;
using nlohmann::json;

template <class Value>
using Words = std::vector<std::pair<const char*, Value>>;

const Words<AttentionKind>& kind_words() {
  static const Words<AttentionKind> words = {{"mla", AttentionKind::kMla},
                                             {"gqa", AttentionKind::kGqa}};
  return words;
}
const Words<IndexerMode>& mode_words() {
  static const Words<IndexerMode> words = {{"standard", IndexerMode::kStandard},
                                           {"simplified", IndexerMode::kSimplified}};
  return words;
}
const Words<nn::RopePairing>& pairing_words() {
  static const Words<nn::RopePairing> words = {{"interleaved", nn::RopePairing::kInterleaved},
                                               {"half_split", nn::RopePairing::kHalfSplit}};
  return words;
}

const Words<OutputPrecision>& output_words() {
  static const Words<OutputPrecision> words = {{"full", OutputPrecision::kFull},
                                               {"bf16", OutputPrecision::kBf16}};
  return words;
}
const Words<SelectionPrecision>& precision_words() {
  static const Words<SelectionPrecision> words = {
      {precision_name(SelectionPrecision::kFull), SelectionPrecision::kFull},
      {precision_name(SelectionPrecision::kMxfp8), SelectionPrecision::kMxfp8},
      {precision_name(SelectionPrecision::kE4m3), SelectionPrecision::kE4m3}};
  return words;
}
const Words<PoolRounding>& rounding_words() {
  static const Words<PoolRounding> words = {{"once", PoolRounding::kOnce},
                                            {"key_dtype", PoolRounding::kKeyDtype}};
  return words;
}

template <class Value>
const char* word_of(Value value, const Words<Value>& words) {
  for (const auto& [name, candidate] : words) {
    if (candidate == value) return name;
  }
  return "";
}

IndexerConfig read_indexer(const json& object, Rules& rules) {
  JsonReader reader(object, "attention.indexer", rules);
  IndexerConfig c;
  c.mode = reader.word("mode", mode_words());
  c.index_heads = reader.integer("index_heads");
  c.index_dim = reader.integer("index_dim");
  c.topk = reader.integer("topk");
  c.rope_dim = reader.integer("rope_dim");
  if (c.rope_dim > 0 || reader.has("rope_pairing")) {
    c.rope_pairing = reader.word("rope_pairing", pairing_words());
  }
  c.relu = reader.boolean("relu");
  c.hadamard = reader.boolean("hadamard");
  if (c.mode == IndexerMode::kStandard) {
    c.k_norm_epsilon = reader.number("k_norm_epsilon");
    if (reader.has("k_norm_output")) c.k_norm_output = reader.word("k_norm_output", output_words());
    if (reader.has("weights_output")) {
      c.weights_output = reader.word("weights_output", output_words());
    }
  } else {
    reader.refuse({"k_norm_epsilon", "k_norm_output", "weights_output"},
                  "belongs to mode \"standard\", mode is \"simplified\"");
  }
  if (reader.has("precision")) c.precision = reader.word("precision", precision_words());
  c.pool_size = reader.integer_or("pool_size", c.pool_size);
  if (c.pools()) {
    if (reader.has("select_tail")) c.select_tail = reader.boolean("select_tail");
    if (reader.has("pool_rounding"))
      c.pool_rounding = reader.word("pool_rounding", rounding_words());
    if (reader.has("hf_scoring")) c.hf_scoring = reader.boolean("hf_scoring");
  } else {
    reader.refuse({"select_tail", "pool_rounding", "hf_scoring"}, "belongs to a pool_size above 1");
  }
  reader.finish();
  return c;
}

AttentionConfig read_attention(const json& object, Rules& rules) {
  JsonReader reader(object, "attention", rules);
  AttentionConfig c;
  c.kind = reader.word("kind", kind_words());
  c.hidden_size = reader.integer("hidden_size");
  c.heads = reader.integer("heads");
  if (c.kind == AttentionKind::kMla) {
    c.q_lora_rank = reader.integer_or("q_lora_rank", 0);
    c.kv_lora_rank = reader.integer("kv_lora_rank");
    c.latent_norm_epsilon = reader.number("latent_norm_epsilon");
    reader.refuse({"kv_heads"}, "belongs to kind \"gqa\", kind is \"mla\"");
  } else {
    c.kv_heads = reader.integer("kv_heads");
    reader.refuse({"q_lora_rank", "kv_lora_rank", "latent_norm_epsilon"},
                  "belongs to kind \"mla\", kind is \"gqa\"");
  }
  c.qk_nope_head_dim = reader.integer("qk_nope_head_dim");
  c.qk_rope_head_dim = reader.integer("qk_rope_head_dim");
  c.v_head_dim = reader.integer("v_head_dim");
  if (c.qk_rope_head_dim > 0 || reader.has("rope_pairing")) {
    c.rope_pairing = reader.word("rope_pairing", pairing_words());
  }
  c.max_positions = reader.integer("max_positions");
  c.indexer = read_indexer(reader.object("indexer"), rules);
  if (c.rotates() || reader.has("rope_theta")) c.rope_theta = reader.number("rope_theta");
  reader.finish();
  return c;
}

json write_indexer(const IndexerConfig& c) {
  json object = {{"mode", word_of(c.mode, mode_words())},
                 {"index_heads", c.index_heads},
                 {"index_dim", c.index_dim},
                 {"topk", c.topk},
                 {"rope_dim", c.rope_dim},
                 {"relu", c.relu},
                 {"hadamard", c.hadamard}};
  if (c.rope_dim > 0) object["rope_pairing"] = word_of(c.rope_pairing, pairing_words());
  if (c.mode == IndexerMode::kStandard) {
    object["k_norm_epsilon"] = c.k_norm_epsilon;
    object["k_norm_output"] = word_of(c.k_norm_output, output_words());
    object["weights_output"] = word_of(c.weights_output, output_words());
  }
  object["precision"] = word_of(c.precision, precision_words());
  object["pool_size"] = c.pool_size;
  if (c.pools()) {
    object["select_tail"] = c.select_tail;
    object["pool_rounding"] = word_of(c.pool_rounding, rounding_words());
    object["hf_scoring"] = c.hf_scoring;
  }
  return object;
}

json write_attention(const AttentionConfig& c) {
  json object = {{"kind", word_of(c.kind, kind_words())},
                 {"hidden_size", c.hidden_size},
                 {"heads", c.heads},
                 {"qk_nope_head_dim", c.qk_nope_head_dim},
                 {"qk_rope_head_dim", c.qk_rope_head_dim},
                 {"v_head_dim", c.v_head_dim},
                 {"max_positions", c.max_positions},
                 {"indexer", write_indexer(c.indexer)}};
  if (c.rotates()) object["rope_theta"] = c.rope_theta;
  if (c.qk_rope_head_dim > 0) object["rope_pairing"] = word_of(c.rope_pairing, pairing_words());
  if (c.kind == AttentionKind::kMla) {
    object["q_lora_rank"] = c.q_lora_rank;
    object["kv_lora_rank"] = c.kv_lora_rank;
    object["latent_norm_epsilon"] = c.latent_norm_epsilon;
  } else {
    object["kv_heads"] = c.kv_heads;
  }
  return object;
}

// A list of names, each at most once, in any order.
MtpSharedComponents read_shared_components(JsonReader& reader) {
  constexpr char kKey[] = "mtp_shared_components";
  MtpSharedComponents shared;
  if (!reader.has(kKey)) return shared;
  for (const std::string& name : reader.strings(kKey)) {
    const bool index = name == "sparse_attention_index";
    if (!index && name != "latent_kv") {
      reader.rules().require(false, kKey, fmt::format("\"{}\"", name),
                             nearest_name(name, {"sparse_attention_index", "latent_kv"}),
                             "may name \"sparse_attention_index\" and \"latent_kv\"");
      continue;
    }
    bool& named = index ? shared.sparse_attention_index : shared.latent_kv;
    reader.rules().require(!named, kKey, fmt::format("\"{}\" twice", name), "name it once",
                           "must name each component once");
    named = true;
  }
  return shared;
}

json write_shared_components(const MtpSharedComponents& shared) {
  json names = json::array();
  if (shared.sparse_attention_index) names.push_back("sparse_attention_index");
  if (shared.latent_kv) names.push_back("latent_kv");
  return names;
}

std::int64_t query_input_size(const AttentionConfig& c) {
  const bool latent_query = c.kind == AttentionKind::kMla && c.q_lora_rank > 0;
  return latent_query ? c.q_lora_rank : c.hidden_size;
}

}  // namespace

std::int64_t attention_parameters(const AttentionConfig& c) {
  const std::int64_t head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim, h = c.hidden_size;
  std::int64_t n = h * c.heads * c.v_head_dim;  // o_proj
  n += c.heads * head_dim * query_input_size(c);
  if (c.kind == AttentionKind::kMla && c.q_lora_rank > 0) n += c.q_lora_rank * (h + 1);
  if (c.kind == AttentionKind::kMla) {
    n += (c.kv_lora_rank + c.qk_rope_head_dim) * h + c.kv_lora_rank +
         c.heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank;
  } else {
    n += c.kv_heads * (head_dim + c.v_head_dim) * h;
  }
  return n;
}

std::int64_t indexer_parameters(const AttentionConfig& c) {
  const IndexerConfig& i = c.indexer;
  std::int64_t n = i.index_heads * i.index_dim * query_input_size(c) + i.index_dim * c.hidden_size;
  if (i.mode == IndexerMode::kStandard) n += 2 * i.index_dim + i.index_heads * c.hidden_size;
  if (i.pools()) n += i.index_dim * (c.hidden_size + i.pool_size);
  return n;
}

std::vector<std::int64_t> index_layers(const ModelConfig& c) {
  std::vector<std::int64_t> owners;
  for (std::int64_t n = 0; n < c.layers + (c.mtp_depths > 0 ? 1 : 0); ++n) {
    if (computes_indices(c.sharing, n + 1)) owners.push_back(n);
  }
  return owners;
}

// Every width is at most 2^24, so that a layer's count stays below 2^52.
std::int64_t parameter_count(const ModelConfig& c) {
  const std::int64_t h = c.attention.hidden_size, mtp = c.mtp_depths > 0 ? 1 : 0;
  const std::int64_t layer =
      attention_parameters(c.attention) + 3 * h * c.intermediate_size + 2 * h;
  const auto indexers = static_cast<std::int64_t>(index_layers(c).size());
  return (c.layers + mtp) * layer + indexers * indexer_parameters(c.attention) +
         mtp * (2 * h + 3) * h + c.vocab_size * h * (c.tied_embeddings ? 1 : 2) + h;
}

void check(const ModelConfig& c, Rules& rules) {
  constexpr std::int64_t kMaxSize = std::int64_t{1} << 24, kMaxLayers = 1024, kMaxDepths = 64,
                         kMaxParameters = std::int64_t{1} << 42;
  const auto range = [&](const char* option, std::int64_t value, std::int64_t least,
                         std::int64_t most) {
    rules.require(value >= least && value <= most, option, value, std::clamp(value, least, most),
                  "must be from {} to {}", least, most);
  };
  range("vocab_size", c.vocab_size, 1, kMaxSize);
  range("layers", c.layers, 1, kMaxLayers);
  range("intermediate_size", c.intermediate_size, 1, kMaxSize);
  rules.require(std::isfinite(c.norm_epsilon) && c.norm_epsilon > 0, "norm_epsilon", c.norm_epsilon,
                1e-6, "must be positive and finite");
  attention::check(c.attention, rules);
  range("topk_freq", c.sharing.topk_freq, 1, kMaxLayers);
  range("skip_topk_offset", c.sharing.skip_topk_offset, 0, kMaxLayers);
  range("mtp_depths", c.mtp_depths, 0, kMaxDepths);
  rules.require(!c.mtp_shared_components.any() || c.mtp_depths > 1, "mtp_shared_components",
                c.mtp_depths, "mtp_depths 2",
                "needs mtp_depths of at least 2, since later depths take from the first");
  rules.require(!c.mtp_shared_components.latent_kv || c.attention.kind == AttentionKind::kMla,
                "mtp_shared_components", "\"gqa\"", "sparse_attention_index",
                "\"latent_kv\" needs attention.kind \"mla\"");
  if (!rules.kept()) return;  // sizes that are none cannot be counted with
  const std::int64_t parameters = parameter_count(c);
  rules.require(parameters <= kMaxParameters, "the sizes", parameters, "fewer layers",
                "must make a model of at most {} parameters", kMaxParameters);
}

void validate(const ModelConfig& config) {
  Rules strict;
  check(config, strict);
}

ModelConfig read_model_config(const json& object) {
  Rules strict;
  return read_model_config(object, strict);
}

ModelConfig read_model_config(const json& object, Rules& rules) {
  JsonReader reader(object, "", rules);
  ModelConfig c;
  c.vocab_size = reader.integer_or("vocab_size", c.vocab_size);
  c.layers = reader.integer("layers");
  c.intermediate_size = reader.integer("intermediate_size");
  c.norm_epsilon = reader.number("norm_epsilon");
  c.tied_embeddings = reader.boolean("tied_embeddings");
  c.sharing.topk_freq = reader.integer_or("topk_freq", c.sharing.topk_freq);
  c.sharing.skip_topk_offset = reader.integer_or("skip_topk_offset", c.sharing.skip_topk_offset);
  c.mtp_depths = reader.integer_or("mtp_depths", c.mtp_depths);
  c.mtp_shared_components = read_shared_components(reader);
  c.attention = read_attention(reader.object("attention"), rules);
  reader.finish();
  check(c, rules);
  return c;
}

json write_model_config(const ModelConfig& c) {
  return {{"vocab_size", c.vocab_size},
          {"layers", c.layers},
          {"intermediate_size", c.intermediate_size},
          {"norm_epsilon", c.norm_epsilon},
          {"tied_embeddings", c.tied_embeddings},
          {"topk_freq", c.sharing.topk_freq},
          {"skip_topk_offset", c.sharing.skip_topk_offset},
          {"mtp_depths", c.mtp_depths},
          {"mtp_shared_components", write_shared_components(c.mtp_shared_components)},
          {"attention", write_attention(c.attention)}};
}

}  // namespace winnow::model
