// Configurations from JSON: what is read comes back, and everything else is refused by name.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "tests/tiny_models.h"
#include "winnow/error.h"

namespace winnow::model {
namespace {

using nlohmann::json;

// What the refusal of `object` says; "" if it is accepted.
std::string refusal(const json& object) {
  try {
    read_model_config(object);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    return error.what();
  }
  return "";
}

// `path` is a JSON pointer: "/attention/indexer/topk".
json with(json object, const char* path, const json& value) {
  object[json::json_pointer(path)] = value;
  return object;
}
json without(json object, const char* path) {
  const json::json_pointer pointer(path);
  object[pointer.parent_pointer()].erase(pointer.back());
  return object;
}

std::vector<std::pair<std::string, ModelConfig>> all_models() {
  auto all = tiny_models();
  for (const auto& model : pool_models()) all.push_back(model);
  return all;
}

TEST(Config, WhatIsWrittenIsReadBack) {
  for (const auto& [name, config] : all_models()) {
    const json object = write_model_config(config);
    EXPECT_EQ(refusal(object), "") << name;
    EXPECT_EQ(write_model_config(read_model_config(object)), object) << name;
    const json again = json::parse(object.dump());  // through text
    EXPECT_EQ(write_model_config(read_model_config(again)), object) << name;
  }
}

TEST(Config, EveryFieldArrives) {
  ModelConfig config = tiny_model(tiny_mla());
  config.vocab_size = 301;
  config.sharing = {4, 3};
  config.mtp_depths = 5;
  config.mtp_shared_components.latent_kv = true;
  const ModelConfig c = read_model_config(write_model_config(config));
  EXPECT_EQ(c.vocab_size, 301);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.intermediate_size, 10);
  EXPECT_EQ(c.norm_epsilon, 1e-5);
  EXPECT_TRUE(c.tied_embeddings);
  EXPECT_EQ(c.sharing.topk_freq, 4);
  EXPECT_EQ(c.sharing.skip_topk_offset, 3);
  EXPECT_EQ(c.mtp_depths, 5);
  EXPECT_TRUE(c.mtp_shared_components.latent_kv);
  EXPECT_FALSE(c.mtp_shared_components.sparse_attention_index);
  EXPECT_EQ(c.attention.kind, attention::AttentionKind::kMla);
  EXPECT_EQ(c.attention.hidden_size, 12);
  EXPECT_EQ(c.attention.heads, 3);
  EXPECT_EQ(c.attention.q_lora_rank, 7);
  EXPECT_EQ(c.attention.kv_lora_rank, 6);
  EXPECT_EQ(c.attention.qk_nope_head_dim, 5);
  EXPECT_EQ(c.attention.qk_rope_head_dim, 4);
  EXPECT_EQ(c.attention.v_head_dim, 3);
  EXPECT_EQ(c.attention.latent_norm_epsilon, 1e-6);
  EXPECT_EQ(c.attention.rope_theta, 100);
  EXPECT_EQ(c.attention.rope_pairing, nn::RopePairing::kInterleaved);
  EXPECT_EQ(c.attention.max_positions, 64);
  EXPECT_EQ(c.attention.indexer.mode, attention::IndexerMode::kStandard);
  EXPECT_EQ(c.attention.indexer.index_heads, 3);
  EXPECT_EQ(c.attention.indexer.index_dim, 8);
  EXPECT_EQ(c.attention.indexer.topk, 4);
  EXPECT_EQ(c.attention.indexer.rope_dim, 4);
  EXPECT_EQ(c.attention.indexer.rope_pairing, nn::RopePairing::kHalfSplit);
  EXPECT_TRUE(c.attention.indexer.relu);
  EXPECT_TRUE(c.attention.indexer.hadamard);
  EXPECT_EQ(c.attention.indexer.k_norm_epsilon, 1e-6);
  EXPECT_EQ(c.attention.indexer.precision, attention::SelectionPrecision::kFull);
  config.attention.indexer.index_dim = 32;
  config.attention.indexer.precision = attention::SelectionPrecision::kMxfp8;
  config.attention.indexer.k_norm_output = attention::OutputPrecision::kBf16;
  config.attention.indexer.weights_output = attention::OutputPrecision::kBf16;
  const attention::IndexerConfig i =
      read_model_config(write_model_config(config)).attention.indexer;
  EXPECT_EQ(i.precision, attention::SelectionPrecision::kMxfp8);
  EXPECT_EQ(i.k_norm_output, attention::OutputPrecision::kBf16);
  EXPECT_EQ(i.weights_output, attention::OutputPrecision::kBf16);
}

TEST(Config, UnknownKeysAreRefusedWithTheNearestName) {
  const json good = write_model_config(tiny_model(tiny_mla()));
  EXPECT_EQ(refusal(with(good, "/layer", 3)),
            "[config] \"layer\" is not an option; did you mean layers?");
  EXPECT_EQ(refusal(with(good, "/attention/indexer/top_k", 3)),
            "[config] \"attention.indexer.top_k\" is not an option; did you mean "
            "attention.indexer.topk?");
  EXPECT_EQ(refusal(with(good, "/attention/kv_heads", 3)),
            "[config] attention.kv_heads belongs to kind \"gqa\", kind is \"mla\", got 3");
}

TEST(Config, EveryKeyIsRequired) {
  for (const auto& [name, config] : all_models()) {
    const json good = write_model_config(config);
    const json flat = good.flatten();
    for (const auto& [path, value] : flat.items()) {
      const bool precision = path.ends_with("/precision") || path.ends_with("_output");
      const bool pools = path.ends_with("/select_tail") || path.ends_with("/pool_rounding") ||
                         path.ends_with("/hf_scoring");
      if (path.ends_with("/pool_size")) {  // the others belong to it
        const std::string text = refusal(without(good, path.c_str()));
        EXPECT_EQ(text.empty(), config.attention.indexer.pool_size == 1) << name << text;
        continue;
      }
      const bool sharing = path.starts_with("/mtp_") || path.ends_with("/topk_freq") ||
                           path.ends_with("/skip_topk_offset");
      const bool optional = path == "/vocab_size" || path == "/attention/q_lora_rank" ||
                            precision || sharing || pools;
      const std::string text = refusal(without(good, path.c_str()));
      if (optional) {
        EXPECT_EQ(text, "") << path;
      } else {
        EXPECT_NE(text.find("is required"), std::string::npos) << name << " " << path << text;
      }
    }
    EXPECT_NE(refusal(without(good, "/attention")).find("attention is required"),
              std::string::npos);
  }
}

TEST(Config, WrongTypesAreRefused) {
  for (const auto& [name, config] : all_models()) {
    const json good = write_model_config(config);
    const json flat = good.flatten();
    for (const auto& [path, value] : flat.items()) {
      for (const json& wrong :
           {json(nullptr), json::array({1}), json::object(), json("\xff\xfe no text")}) {
        const std::string text = refusal(with(good, path.c_str(), wrong));
        EXPECT_NE(text.find(" must be "), std::string::npos) << name << " " << path << text;
      }
      if (value.is_number_integer()) {
        EXPECT_NE(refusal(with(good, path.c_str(), 2.5)), "") << path;
        EXPECT_NE(refusal(with(good, path.c_str(), 18446744073709551615u)), "") << path;
      }
    }
  }
  EXPECT_NE(refusal(json::array()), "");
  EXPECT_NE(refusal(json()), "");
}

struct Rule {
  const char* path;
  json value;
  const char* says;
};

void expect_refused(const json& good, const std::vector<Rule>& rules) {
  ASSERT_EQ(refusal(good), "");
  for (const Rule& rule : rules) {
    const std::string text = refusal(with(good, rule.path, rule.value));
    EXPECT_NE(text.find(rule.says), std::string::npos) << rule.path << ": " << text;
  }
}

TEST(Config, RulesAreNamedWithTheirValues) {
  const std::int64_t huge = std::int64_t{1} << 62;
  expect_refused(
      write_model_config(tiny_model(tiny_mla())),
      {{"/layers", 0, "layers must be from 1 to 1024, got 0"},
       {"/layers", huge, "layers must be from 1"},
       {"/vocab_size", -1, "vocab_size must be from 1"},
       {"/intermediate_size", 0, "intermediate_size must be from 1"},
       {"/norm_epsilon", 0, "norm_epsilon must be positive and finite, got 0"},
       {"/attention/kind", "mqa", "attention.kind must be one of \"mla\", \"gqa\", got \"mqa\""},
       {"/attention/hidden_size", 0, "attention.hidden_size must be from 1"},
       {"/attention/hidden_size", huge, "attention.hidden_size must be from 1"},
       {"/attention/heads", 1 << 23, "must be at most 16777216, got 8388608 * 9"},
       {"/attention/q_lora_rank", -1, "attention.q_lora_rank must be from 0"},
       {"/attention/kv_lora_rank", 0, "attention.kv_lora_rank must be from 1"},
       {"/attention/qk_nope_head_dim", 0, "attention.qk_nope_head_dim must be from 1"},
       {"/attention/qk_rope_head_dim", 3, "attention.qk_rope_head_dim must be even"},
       {"/attention/v_head_dim", 0, "attention.v_head_dim must be from 1"},
       {"/attention/latent_norm_epsilon", -1e-6, "attention.latent_norm_epsilon must be positive"},
       {"/attention/rope_theta", 0, "attention.rope_theta must be positive"},
       {"/attention/rope_pairing", "both", "attention.rope_pairing must be one of"},
       {"/attention/max_positions", 0, "attention.max_positions must be from 1"},
       {"/attention/indexer/mode", "simplified", "k_norm_epsilon belongs to mode \"standard\""},
       {"/attention/indexer/index_heads", 0, "indexer.index_heads must be from 1"},
       {"/attention/indexer/index_dim", 2,
        "must be at least attention.indexer.rope_dim = 4, got 2"},
       {"/attention/indexer/index_dim", 12, "must be a power of two"},
       {"/attention/indexer/topk", 0, "indexer.topk must be from 1"},
       {"/attention/indexer/rope_dim", 3, "indexer.rope_dim must be even"},
       {"/attention/indexer/rope_pairing", "x", "indexer.rope_pairing must be one of"},
       {"/attention/indexer/k_norm_epsilon", 0, "indexer.k_norm_epsilon must be positive"},
       {"/attention/indexer/k_norm_output", "fp32",
        "k_norm_output must be one of \"full\", \"bf16\""},
       {"/attention/indexer/weights_output", "f", "weights_output must be one of"},
       {"/attention/indexer/precision", "fp8", "precision must be one of \"full\", \"mxfp8\""},
       {"/attention/indexer/precision", "mxfp8", "index_dim to be a multiple of 32, got 8"}});
  expect_refused(
      write_model_config(tiny_model(tiny_gqa())),
      {{"/attention/kv_heads", 3, "attention.heads must be a multiple of attention.kv_heads = 3"},
       {"/attention/kv_heads", 0, "attention.kv_heads must be from 1"},
       {"/attention/q_lora_rank", 0, "belongs to kind \"mla\""},
       {"/attention/kv_lora_rank", 4, "belongs to kind \"mla\""}});
  expect_refused(write_model_config(tiny_model(tiny_simplified())),
                 {{"/attention/indexer/index_heads", 2, "index_heads must be 1"},
                  {"/attention/indexer/relu", true, "relu must be false"},
                  {"/attention/indexer/hadamard", true, "hadamard must be false"}});
  attention::AttentionConfig simplified = tiny_mla();
  simplified.indexer = tiny_simplified().indexer;
  EXPECT_NE(
      refusal(write_model_config(tiny_model(simplified))).find("needs attention.kind \"gqa\""),
      std::string::npos);
}

TEST(Config, PoolsArriveAndTheirRulesAreNamed) {
  ModelConfig config = pool_models()[0].second;
  attention::IndexerConfig& indexer = config.attention.indexer;
  indexer.select_tail = false;
  indexer.pool_rounding = PoolRounding::kKeyDtype;
  indexer.weights_output = attention::OutputPrecision::kBf16;
  indexer.hf_scoring = true;
  json good = write_model_config(config);
  const attention::IndexerConfig i = read_model_config(good).attention.indexer;
  EXPECT_EQ(i.pool_size, 2);
  EXPECT_FALSE(i.select_tail);
  EXPECT_EQ(i.pool_rounding, PoolRounding::kKeyDtype);
  EXPECT_TRUE(i.hf_scoring);
  good["attention"]["indexer"].erase("select_tail");
  EXPECT_TRUE(read_model_config(good).attention.indexer.select_tail);  // default
  expect_refused(good,
                 {{"/attention/indexer/topk", 5,
                   "topk must be a multiple of attention.indexer.pool_size = 2, got 5"},
                  {"/attention/indexer/pool_size", -2, "belongs to a pool_size above 1"},
                  {"/attention/indexer/pool_size", 1, "belongs to a pool_size above 1"},
                  {"/attention/indexer/pool_size", 5000, "must be from 1 to 4096, got 5000"},
                  {"/attention/indexer/pool_rounding", "bf16",
                   "pool_rounding must be one of \"once\", \"key_dtype\""},
                  {"/attention/indexer/precision", "e4m3", "hf_scoring needs"},
                  {"/attention/indexer/weights_output", "full", "hf_scoring needs"},
                  {"/attention/indexer/poolsize", 2, "did you mean attention.indexer.pool_size?"}});
  good["attention"]["indexer"].erase("hf_scoring");
  expect_refused(good, {{"/attention/indexer/precision", "mxfp8", "pool_size 1, got 2"},
                        {"/attention/indexer/precision", "e4m3", "hadamard to be false"}});
}

// NoPE: what rotates is asked for where something does.
TEST(Config, WithoutRotaryChannelsNothingAsksForThem) {
  attention::AttentionConfig still = tiny_mla();
  still.qk_rope_head_dim = still.indexer.rope_dim = 0;
  still.rope_theta = 0;
  const json none = write_model_config(tiny_model(still));
  for (const char* key :
       {"/attention/rope_theta", "/attention/rope_pairing", "/attention/indexer/rope_pairing"}) {
    EXPECT_FALSE(none.contains(json::json_pointer(key))) << key;
  }
  EXPECT_EQ(refusal(none), "");
  EXPECT_EQ(refusal(with(none, "/attention/rope_theta", 1e4)), "");  // may stay
  expect_refused(none, {{"/attention/qk_rope_head_dim", 4, "rope_pairing is required"},
                        {"/attention/indexer/rope_dim", 4, "rope_pairing is required"},
                        {"/attention/rope_theta", "x", "rope_theta must be a number"}});
  EXPECT_NE(refusal(with(with(none, "/attention/indexer/rope_dim", 4),
                         "/attention/indexer/rope_pairing", "half_split"))
                .find("attention.rope_theta is required"),
            std::string::npos);
}

// What depths may share, and what sharing needs.
TEST(Config, SharedComponentsAreAListOfNames) {
  json good = write_model_config(tiny_model(tiny_mla()));
  good["mtp_depths"] = 2;
  const std::vector<json> lists = {json::array(),
                                   {"latent_kv"},
                                   {"sparse_attention_index"},
                                   {"latent_kv", "sparse_attention_index"},
                                   {"sparse_attention_index", "latent_kv"}};
  for (const json& list : lists) {
    EXPECT_EQ(refusal(with(good, "/mtp_shared_components", list)), "") << list.dump();
  }
  expect_refused(good, {{"/mtp_shared_components", "latent_kv", "must be a list"},
                        {"/mtp_shared_components", json::array({3}), "must be strings, got 3"},
                        {"/mtp_shared_components", json::array({"latent"}), "got \"latent\""},
                        {"/mtp_shared_components", json::array({"latent_kv", "latent_kv"}),
                         "got \"latent_kv\" twice"},
                        {"/mtp_depths", -1, "mtp_depths must be from 0 to 64, got -1"},
                        {"/topk_freq", 0, "topk_freq must be from 1 to 1024, got 0"},
                        {"/skip_topk_offset", -1, "skip_topk_offset must be from 0"}});
  good["mtp_shared_components"] = {"sparse_attention_index"};
  expect_refused(good, {{"/mtp_depths", 1, "needs mtp_depths of at least 2"},
                        {"/mtp_depths", 0, "needs mtp_depths of at least 2"}});
  json gqa = write_model_config(tiny_model(tiny_gqa()));
  gqa["mtp_depths"] = 2;
  gqa["mtp_shared_components"] = {"sparse_attention_index"};
  expect_refused(gqa, {{"/mtp_shared_components", json::array({"latent_kv"}),
                        "\"latent_kv\" needs attention.kind \"mla\""}});
}

TEST(Config, LayersThatOwnAnIndexer) {
  using Layers = std::vector<std::int64_t>;
  ModelConfig c = tiny_model(tiny_mla());
  c.layers = 8;
  c.sharing = {4, 3};
  EXPECT_EQ(index_layers(c), (Layers{0, 1, 2, 6}));
  c.mtp_depths = 3;  // layer 9 of 1, 2, 3, 7, 11 reuses
  EXPECT_EQ(index_layers(c), (Layers{0, 1, 2, 6}));
  c.layers = 10;
  EXPECT_EQ(index_layers(c), (Layers{0, 1, 2, 6, 10}));
  c.mtp_depths = 0;
  EXPECT_EQ(index_layers(c), (Layers{0, 1, 2, 6}));
}

// No product of sizes may overflow on its way to a refusal.
TEST(Config, AbsurdSizesAreRefused) {
  json object = write_model_config(tiny_model(tiny_mla()));
  for (const char* path :
       {"/layers", "/vocab_size", "/intermediate_size", "/attention/hidden_size"}) {
    object[json::json_pointer(path)] = path == std::string("/layers") ? 1024 : 1 << 24;
  }
  EXPECT_NE(refusal(object).find("must make a model of at most"), std::string::npos);
}

}  // namespace
}  // namespace winnow::model
