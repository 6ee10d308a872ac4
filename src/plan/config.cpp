#include "plan/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "model/json_reader.h"

namespace winnow::plan {
namespace {

using model::JsonReader;
using nlohmann::json;

void optional(JsonReader& reader, const char* key, std::int64_t& value) {
  if (reader.has(key)) value = reader.integer(key);
}
void optional(JsonReader& reader, const char* key, double& value) {
  if (reader.has(key)) value = reader.number(key);
}
void optional(JsonReader& reader, const char* key, bool& value) {
  if (reader.has(key)) value = reader.boolean(key);
}
void optional(JsonReader& reader, const char* key, std::string& value) {
  if (reader.has(key)) value = reader.string(key);
}

MoeConfig read_moe(const json& object, Rules& rules) {
  JsonReader reader(object, "plan.moe", rules);
  MoeConfig c;
  c.experts = reader.integer("experts");
  c.experts_per_token = reader.integer("experts_per_token");
  c.intermediate_size = reader.integer("intermediate_size");
  optional(reader, "shared_experts", c.shared_experts);
  optional(reader, "dense_layers", c.dense_layers);
  reader.finish();
  return c;
}

MambaConfig read_mamba(const json& object, Rules& rules) {
  JsonReader reader(object, "plan.mamba", rules);
  MambaConfig c;
  optional(reader, "state_dim", c.state_dim);
  optional(reader, "head_dim", c.head_dim);
  optional(reader, "groups", c.groups);
  optional(reader, "expand", c.expand);
  reader.finish();
  return c;
}

StepGraph read_step_graph(const json& object, Rules& rules) {
  JsonReader reader(object, "plan.step_graph", rules);
  StepGraph c;
  c.scope = reader.word<GraphScope>(
      "scope",
      {{"none", GraphScope::kNone}, {"layer", GraphScope::kLayer}, {"step", GraphScope::kStep}});
  if (reader.has("modules")) c.modules = reader.strings("modules");
  reader.finish();
  return c;
}

}  // namespace

bool StepGraph::captures_attention() const {
  return scope == GraphScope::kLayer &&
         (modules.empty() ||
          std::find(modules.begin(), modules.end(), "attention") != modules.end());
}

std::int64_t PlanConfig::rows() const { return micro_batch_sequences * context / cp; }

std::int64_t PlanConfig::micro_batches() const {
  return std::max<std::int64_t>(1, batch_sequences / (micro_batch_sequences * dp));
}

std::string PlanConfig::letters() const { return layer_pattern.substr(0, layer_pattern.find('/')); }

std::string PlanConfig::mtp_letters() const {
  const std::size_t begin = layer_pattern.find('/');
  if (begin == std::string::npos) return "";
  return layer_pattern.substr(begin + 1, layer_pattern.find('/', begin + 1) - begin - 1);
}

bool PlanConfig::is_dsa(std::int64_t layer) const {
  if (!hybrid()) return true;
  const std::string all = letters() + mtp_letters();
  const auto at = static_cast<std::size_t>(layer - 1);
  return layer >= 1 && at < all.size() && all[at] == 'D';
}

bool PlanConfig::is_moe(std::int64_t layer) const {
  return moe.experts > 0 && layer > moe.dense_layers;
}

void read_plan_options(const json& object, PlanConfig& c, Rules& rules) {
  JsonReader reader(object, "plan", rules);
  if (reader.has("moe")) c.moe = read_moe(reader.object("moe"), rules);
  if (reader.has("mamba")) c.mamba = read_mamba(reader.object("mamba"), rules);
  reader.refuse({"pool"}, "is model.attention.indexer.pool_size and select_tail");
  optional(reader, "layer_pattern", c.layer_pattern);
  if (reader.has("lengths")) {
    for (const json& length : reader.array("lengths")) {
      const bool whole = length.is_number_integer();
      rules.require(whole, "plan.lengths", "something else", "a list of lengths",
                    "must hold whole numbers");
      if (whole) c.lengths.push_back(length.get<std::int64_t>());
    }
  }
  if (reader.has("stage")) {
    const std::string name = reader.string("stage");
    std::vector<std::string> names;
    for (const StageMode& stage : c.stages) names.push_back(stage.name);
    const auto found = std::find(names.begin(), names.end(), name);
    rules.require(found != names.end(), "plan.stage", "\"" + name.substr(0, 40) + "\"",
                  nearest_name(name, names), "must be the name of one of the stages");
    if (found != names.end()) c.stage = static_cast<std::size_t>(found - names.begin());
  }
  if (reader.has("step_graph")) c.step_graph = read_step_graph(reader.object("step_graph"), rules);
  optional(reader, "pp", c.pp);
  optional(reader, "cp", c.cp);
  optional(reader, "dp", c.dp);
  optional(reader, "ep", c.ep);
  optional(reader, "virtual_stages", c.virtual_stages);
  optional(reader, "layout", c.layout);
  if (reader.has("dtype")) {
    c.dtype = reader.word<DType>("dtype", {{"f32", DType::kF32}, {"bf16", DType::kBF16}});
  }
  optional(reader, "shard_optimizer", c.shard_optimizer);
  optional(reader, "score_budget_gib", c.score_budget_gib);
  optional(reader, "machine", c.machine);
  optional(reader, "efficiency", c.efficiency);
  reader.finish();
}

}  // namespace winnow::plan
