#include "train/initial_weights.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "model/safetensors.h"
#include "train/checkpoint.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOperation = "initial_checkpoint";
constexpr std::string_view kIndexer = ".indexer.";

// "model.layers.3.self_attn.indexer." of one of its weights; "" of others.
std::string indexer_of(const std::string& name) {
  const std::size_t at = name.find(kIndexer);
  return at == std::string::npos ? "" : name.substr(0, at + kIndexer.size());
}

// "f32 [24, 16]"
std::string shape_text(const model::SafetensorsEntry& entry) {
  std::string text;
  for (const std::int64_t extent : entry.shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
  }
  return fmt::format("{} [{}]", dtype_name(entry.dtype), text);
}

// A checkpoint without a trainer's state is taken by its word: what it holds was trained.
bool has_trained_indexers(const fs::path& checkpoint) {
  if (!fs::exists(checkpoint / "trainer.json")) return true;
  const TrainerState state = read_trainer_state(checkpoint);
  std::int64_t step = 0;
  for (const StageConfig& stage : state.config.stages) {
    if (step < state.step && stage.attention != attention::AttentionMode::kDense) return true;
    step += stage.steps;
  }
  return false;
}

// The keys of a model that say what its weights mean. Lengths and schedules do not, and those of
// indexers only where these come with the weights.
json meaning(const model::ModelConfig& config, bool indexers) {
  json object = model::write_model_config(config);
  for (const char* key : {"topk_freq", "skip_topk_offset", "mtp_depths", "mtp_shared_components"}) {
    object.erase(key);
  }
  json& attention = object["attention"];
  attention.erase("max_positions");
  if (!indexers) {
    attention.erase("indexer");
  } else {
    for (const char* key : {"topk", "precision"}) attention["indexer"].erase(key);
  }
  return object;
}

}  // namespace

InitialWeights load_initial_weights(const fs::path& place, model::Transformer& model) {
  InitialWeights result;
  result.checkpoint = find_checkpoint(place, result.damaged);
  const fs::path path = result.checkpoint / "model.safetensors";
  const model::SafetensorsFile file(path);
  const bool trained = has_trained_indexers(result.checkpoint);
  std::vector<std::string> held;  // indexers of the file
  for (const model::SafetensorsEntry& entry : file.entries()) {
    const std::string indexer = indexer_of(entry.name);
    const bool ignored =
        !indexer.empty() && (!trained || model.parameters().find(entry.name) == nullptr);
    WINNOW_CHECK(kOperation, ignored || model.parameters().find(entry.name) != nullptr,
                 "{} holds tensor {}, for which this model has no place: the model must be that of "
                 "{}",
                 path.string(), entry.name, (result.checkpoint / "config.json").string());
    if (!indexer.empty() && !ignored) held.push_back(indexer);
  }
  std::vector<std::string> fresh;
  std::vector<const Parameter*> taken;
  for (const auto& p : model.parameters().all()) {
    const std::string indexer = indexer_of(p->name);
    if (!indexer.empty() && std::find(held.begin(), held.end(), indexer) == held.end()) {
      if (std::find(fresh.begin(), fresh.end(), indexer) == fresh.end()) fresh.push_back(indexer);
      continue;
    }
    const model::SafetensorsEntry* entry = file.find(p->name);
    const Tensor& value = p->value;
    WINNOW_CHECK(kOperation, entry != nullptr,
                 "{} has no tensor {}, which this model needs: the model must be that of {}",
                 path.string(), p->name, (result.checkpoint / "config.json").string());
    const std::vector<std::int64_t> shape(value.shape.begin(), value.shape.begin() + value.rank);
    WINNOW_CHECK(kOperation, entry->dtype == value.dtype && entry->shape == shape,
                 "tensor {} of {} must be {} as in this model, got {}", p->name, path.string(),
                 winnow::shape_text(value), shape_text(*entry));
    taken.push_back(p.get());
  }
  const model::ModelConfig config = load_model_config(result.checkpoint);
  const std::string difference =
      first_difference(meaning(config, trained), meaning(model.config(), trained));
  WINNOW_CHECK(kOperation, difference.empty(),
               "model.{} differs from {}: the weights were trained with the value there",
               difference, (result.checkpoint / "config.json").string());
  for (const Parameter* p : taken) file.read_into(p->name, p->value);
  result.new_indexers = std::ssize(fresh);
  return result;
}

}  // namespace winnow::train
