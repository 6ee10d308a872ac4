#include "train/config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "model/json_reader.h"

namespace winnow::train {
namespace {

using attention::AttentionMode;
using model::JsonReader;
using nlohmann::json;

constexpr const char* kOperation = "config";
constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;
constexpr std::int64_t kMaxSteps = 99'999'999;  // eight digits: names of checkpoints sort as text
constexpr std::int64_t kMaxStepTokens = std::int64_t{1} << 36;  // x kMaxSteps is below 2^63

const std::vector<std::pair<const char*, AttentionMode>> kModes = {
    {"dense", AttentionMode::kDense},
    {"warmup", AttentionMode::kWarmup},
    {"sparse", AttentionMode::kSparse},
};

// Reads into `value` where the key is there; its default stays otherwise.
void optional(JsonReader& reader, const char* key, std::int64_t& value) {
  if (reader.has(key)) value = reader.integer(key);
}
void optional(JsonReader& reader, const char* key, double& value) {
  if (reader.has(key)) value = reader.number(key);
}

void check_count(const std::string& name, std::int64_t value, std::int64_t least) {
  WINNOW_CHECK(kOperation, value >= least && value <= kMaxCount, "{} must be from {} to {}, got {}",
               name, least, kMaxCount, value);
}
// least <= value < limit; NaN fails.
void check_range(const std::string& name, double value, double least, double limit) {
  WINNOW_CHECK(kOperation, value >= least && value < limit, "{} must be in [{}, {}), got {}", name,
               least, limit, value);
}
void check_positive(const std::string& name, double value) {
  WINNOW_CHECK(kOperation, value > 0 && std::isfinite(value),
               "{} must be positive and finite, got {}", name, value);
}

DataConfig read_data(const json& object, std::int64_t max_positions) {
  JsonReader reader(object, "data");
  DataConfig c;
  c.path = reader.string("path");
  optional(reader, "validation_fraction", c.validation_fraction);
  c.context = reader.integer("context");
  c.batch_sequences = reader.integer("batch_sequences");
  c.micro_batch_sequences = c.batch_sequences;
  optional(reader, "micro_batch_sequences", c.micro_batch_sequences);
  optional(reader, "validation_windows", c.validation_windows);
  reader.finish();
  WINNOW_CHECK(kOperation, !c.path.empty(), "data.path must name a text file, got \"\"");
  constexpr double kLeastShare = 1e-6;  // the bytes that it asks for stay exact in a double
  WINNOW_CHECK(kOperation,
               c.validation_fraction >= kLeastShare && c.validation_fraction <= 1 - kLeastShare,
               "data.validation_fraction must be from {} to {}, got {}", kLeastShare,
               1 - kLeastShare, c.validation_fraction);
  check_count("data.context", c.context, 1);
  WINNOW_CHECK(kOperation, c.context <= max_positions,
               "data.context must be at most model.attention.max_positions = {}, got {}",
               max_positions, c.context);
  check_count("data.batch_sequences", c.batch_sequences, 1);
  WINNOW_CHECK(kOperation,
               c.micro_batch_sequences >= 1 && c.batch_sequences % c.micro_batch_sequences == 0,
               "data.micro_batch_sequences must divide data.batch_sequences = {}, got {}",
               c.batch_sequences, c.micro_batch_sequences);
  constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;  // row ids are 32 bit
  WINNOW_CHECK(kOperation, c.micro_batch_sequences <= kMaxRows / c.context,
               "data.micro_batch_sequences x data.context must be at most {}, got {} x {}",
               kMaxRows, c.micro_batch_sequences, c.context);
  WINNOW_CHECK(kOperation, c.batch_sequences <= kMaxStepTokens / c.context,
               "data.batch_sequences x data.context must be at most {}, got {} x {}",
               kMaxStepTokens, c.batch_sequences, c.context);
  check_count("data.validation_windows", c.validation_windows, 1);
  return c;
}

OptimizerConfig read_optimizer(const json& object) {
  JsonReader reader(object, "optimizer");
  OptimizerConfig c;
  optional(reader, "beta1", c.beta1);
  optional(reader, "beta2", c.beta2);
  optional(reader, "epsilon", c.epsilon);
  optional(reader, "weight_decay", c.weight_decay);
  optional(reader, "clip_norm", c.clip_norm);
  reader.finish();
  check_range("optimizer.beta1", c.beta1, 0, 1);
  check_range("optimizer.beta2", c.beta2, 0, 1);
  check_positive("optimizer.epsilon", c.epsilon);
  check_range("optimizer.weight_decay", c.weight_decay, 0, 1e3);
  check_positive("optimizer.clip_norm", c.clip_norm);
  return c;
}

StageConfig read_stage(const json& object, const std::string& path) {
  JsonReader reader(object, path);
  StageConfig c;
  c.name = reader.string("name");
  c.attention = reader.word("attention", kModes);
  c.steps = reader.integer("steps");
  c.learning_rate = reader.number("learning_rate");
  c.final_learning_rate = c.learning_rate;
  optional(reader, "final_learning_rate", c.final_learning_rate);
  optional(reader, "warmup_steps", c.warmup_steps);
  optional(reader, "index_loss_coefficient", c.index_loss_coefficient);
  reader.finish();
  WINNOW_CHECK(kOperation, !c.name.empty(), "{}.name must not be empty", path);
  check_count(path + ".steps", c.steps, 1);
  check_positive(path + ".learning_rate", c.learning_rate);
  WINNOW_CHECK(kOperation, c.final_learning_rate >= 0 && c.final_learning_rate <= c.learning_rate,
               "{}.final_learning_rate must be from 0 to learning_rate = {}, got {}", path,
               c.learning_rate, c.final_learning_rate);
  WINNOW_CHECK(kOperation, c.warmup_steps >= 0 && c.warmup_steps <= c.steps,
               "{}.warmup_steps must be from 0 to steps = {}, got {}", path, c.steps,
               c.warmup_steps);
  check_range(path + ".index_loss_coefficient", c.index_loss_coefficient, 0, 1e6);
  const bool learns = c.index_loss_coefficient > 0;
  WINNOW_CHECK(kOperation, c.attention != AttentionMode::kDense || !learns,
               "{}.index_loss_coefficient must be 0 in a dense stage, where the indexer does not "
               "run, got {}",
               path, c.index_loss_coefficient);
  WINNOW_CHECK(kOperation, c.attention != AttentionMode::kWarmup || learns,
               "{}.index_loss_coefficient must be positive in a warmup stage, which trains nothing "
               "but the indexers, got {}",
               path, c.index_loss_coefficient);
  return c;
}

std::string compare(const json& a, const json& b, const std::string& path) {
  if (a.is_object() && b.is_object()) {
    for (const auto& [key, value] : a.items()) {
      std::string full = path.empty() ? key : fmt::format("{}.{}", path, key);
      if (!b.contains(key)) return full;
      if (std::string found = compare(value, b[key], full); !found.empty()) return found;
    }
    return "";
  }
  if (a.is_array() && b.is_array() && a.size() == b.size()) {
    for (std::size_t i = 0; i < a.size(); ++i) {
      std::string found = compare(a[i], b[i], fmt::format("{}[{}]", path, i));
      if (!found.empty()) return found;
    }
    return "";
  }
  return a == b ? "" : path;
}

}  // namespace

TrainConfig read_train_config(const json& object) {
  JsonReader reader(object, "");
  TrainConfig c;
  c.model = model::read_model_config(reader.object("model"));
  WINNOW_CHECK(kOperation, c.model.mtp_depths == 0,
               "model.mtp_depths cannot be trained yet, got {}", c.model.mtp_depths);
  c.data = read_data(reader.object("data"), c.model.attention.max_positions);
  if (reader.has("optimizer")) c.optimizer = read_optimizer(reader.object("optimizer"));
  const json& stages = reader.array("stages");
  WINNOW_CHECK(kOperation, !stages.empty(), "stages must hold at least one stage, got []");
  for (std::size_t i = 0; i < stages.size(); ++i) {
    c.stages.push_back(read_stage(stages[i], fmt::format("stages[{}]", i)));
    const attention::IndexerConfig& indexer = c.model.attention.indexer;
    if (indexer.precision == attention::SelectionPrecision::kMxfp8) {
      const std::string missing =
          missing_for_mxfp8(indexer, DType::kF32, c.stages.back().attention);
      WINNOW_CHECK(kOperation, missing.empty(),
                   "model.attention.indexer.precision \"mxfp8\" in stages[{}] needs {}", i,
                   missing);
    }
    WINNOW_CHECK(kOperation, total_steps(c) <= kMaxSteps,
                 "the sum of all steps must be at most {}, got {}", kMaxSteps, total_steps(c));
  }
  optional(reader, "checkpoint_every", c.checkpoint_every);
  optional(reader, "validate_every", c.validate_every);
  std::int64_t seed = 1;
  optional(reader, "seed", seed);
  c.output = reader.string("output");
  reader.finish();
  check_count("checkpoint_every", c.checkpoint_every, 0);
  check_count("validate_every", c.validate_every, 0);
  check_count("seed", seed, 0);
  c.seed = static_cast<std::uint64_t>(seed);
  WINNOW_CHECK(kOperation, !c.output.empty(), "output must name a folder, got \"\"");
  WINNOW_CHECK(kOperation, c.model.vocab_size == 256,
               "model.vocab_size must be 256 for text read as bytes, got {}", c.model.vocab_size);
  return c;
}

json write_train_config(const TrainConfig& c) {
  json stages = json::array();
  for (const StageConfig& s : c.stages) {
    stages.push_back({{"name", s.name},
                      {"attention", attention_mode_name(s.attention)},
                      {"steps", s.steps},
                      {"learning_rate", s.learning_rate},
                      {"final_learning_rate", s.final_learning_rate},
                      {"warmup_steps", s.warmup_steps},
                      {"index_loss_coefficient", s.index_loss_coefficient}});
  }
  return {{"model", model::write_model_config(c.model)},
          {"data",
           {{"path", c.data.path},
            {"validation_fraction", c.data.validation_fraction},
            {"context", c.data.context},
            {"batch_sequences", c.data.batch_sequences},
            {"micro_batch_sequences", c.data.micro_batch_sequences},
            {"validation_windows", c.data.validation_windows}}},
          {"optimizer",
           {{"beta1", c.optimizer.beta1},
            {"beta2", c.optimizer.beta2},
            {"epsilon", c.optimizer.epsilon},
            {"weight_decay", c.optimizer.weight_decay},
            {"clip_norm", c.optimizer.clip_norm}}},
          {"stages", stages},
          {"checkpoint_every", c.checkpoint_every},
          {"validate_every", c.validate_every},
          {"seed", c.seed},
          {"output", c.output}};
}

TrainConfig read_train_config_file(const std::filesystem::path& path) {
  const std::string text = read_file(kOperation, path);
  try {
    return read_train_config(json::parse(text));
  } catch (const json::parse_error& error) {
    const std::size_t end = std::min(error.byte, text.size());
    const auto begin = text.begin(), stop = begin + static_cast<std::ptrdiff_t>(end);
    const auto line = std::count(begin, stop, '\n') + 1;
    // "[json.exception...] parse error at line 3, column 5: syntax error while ... - reason"
    std::string reason = error.what();
    if (const std::size_t at = reason.find(": "); at != std::string::npos) reason.erase(0, at + 2);
    fail(Status::kInvalidArgument, kOperation, "{} must be JSON, but breaks in line {}: {}",
         path.string(), line, reason);
  } catch (const json::exception&) {
    fail(Status::kInvalidArgument, kOperation, "{} must hold numbers that a double can hold",
         path.string());
  } catch (const Error& error) {
    // "[config] rule" -> "[config] file: rule"
    const std::string message = error.what(), head = fmt::format("[{}] ", kOperation);
    const std::size_t skip = message.rfind(head, 0) == 0 ? head.size() : 0;
    fail(error.status(), kOperation, "{}: {}", path.string(), message.substr(skip));
  }
}

std::string first_difference(const TrainConfig& a, const TrainConfig& b) {
  const auto deciding = [](const TrainConfig& c) {
    json object = write_train_config(c);
    for (const char* key : {"checkpoint_every", "validate_every", "output"}) object.erase(key);
    object["data"].erase("validation_windows");
    object["data"].erase("path");  // the text itself is compared (train/checkpoint.h)
    return object;
  };
  return compare(deciding(a), deciding(b), "");
}

std::int64_t total_steps(const TrainConfig& config) {
  std::int64_t steps = 0;
  for (const StageConfig& stage : config.stages) steps += stage.steps;
  return steps;
}

const char* attention_mode_name(AttentionMode mode) {
  for (const auto& [name, value] : kModes) {
    if (value == mode) return name;
  }
  return "?";
}

}  // namespace winnow::train
