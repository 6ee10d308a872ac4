#include "train/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/parallel.h"
#include "model/json_reader.h"

namespace winnow::train {
namespace {

using attention::AttentionMode;
using model::JsonReader;
using nlohmann::json;

constexpr const char* kOperation = "config";
constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;
constexpr std::int64_t kMaxSteps = 99'999'999;  // eight digits: names of checkpoints sort as text
constexpr double kMtpLossCoefficient = 0.1;
constexpr std::int64_t kMaxStepTokens = std::int64_t{1} << 36;  // x kMaxSteps is below 2^63

// By the names alone: whether `inner` is the folder `outer` or inside it.
bool lies_in(const std::filesystem::path& inner, const std::filesystem::path& outer) {
  const auto plain = [](const std::filesystem::path& path) {
    return (std::filesystem::absolute(path) / "").lexically_normal();
  };
  const std::filesystem::path way = plain(inner).lexically_relative(plain(outer));
  return !way.empty() && *way.begin() != "..";
}

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

std::vector<std::pair<std::string, bool*>> recompute_parts(model::Recompute& r) {
  return {{"full", &r.full},
          {"core_attention", &r.core_attention},
          {"norms", &r.norms},
          {"mlp", &r.mlp},
          {"query_up_projection", &r.query_up_projection}};
}

void check_count(Rules& rules, const std::string& name, std::int64_t value, std::int64_t least) {
  rules.require(value >= least && value <= kMaxCount, name, value,
                std::clamp(value, least, kMaxCount), "must be from {} to {}", least, kMaxCount);
}
// least <= value < limit; NaN fails.
void check_range(Rules& rules, const std::string& name, double value, double least, double limit,
                 double instead) {
  rules.require(value >= least && value < limit, name, value, instead, "must be in [{}, {})", least,
                limit);
}
void check_positive(Rules& rules, const std::string& name, double value, double instead) {
  rules.require(value > 0 && std::isfinite(value), name, value, instead,
                "must be positive and finite");
}

void check_documents(const DocumentsConfig& c, std::int64_t context, Rules& rules) {
  check_count(rules, "data.documents.max_documents", c.max_documents, 1);
  check_count(rules, "data.documents.length_multiple", c.length_multiple, 1);
  if (c.length_multiple < 1 || context < 1) return;
  rules.require(context % c.length_multiple == 0, "data.documents.length_multiple",
                c.length_multiple, divisor_below(context, c.length_multiple),
                "must divide data.context = {}", context);
}

void check_data(const DataConfig& c, const model::ModelConfig& model, Rules& rules) {
  const std::int64_t max_positions = model.attention.max_positions;
  constexpr double kLeastShare = 1e-6;  // the bytes that it asks for stay exact in a double
  rules.require(c.validation_fraction >= kLeastShare && c.validation_fraction <= 1 - kLeastShare,
                "data.validation_fraction", c.validation_fraction, 0.05, "must be from {} to {}",
                kLeastShare, 1 - kLeastShare);
  check_count(rules, "data.context", c.context, 1);
  rules.require(c.context <= max_positions, "data.context", c.context, max_positions,
                "must be at most model.attention.max_positions = {}", max_positions);
  rules.require(model.mtp_depths == 0 || c.context > model.mtp_depths, "data.context", c.context,
                model.mtp_depths + 1,
                "must be above model.mtp_depths = {}, which look so far ahead", model.mtp_depths);
  if (c.documents) check_documents(*c.documents, c.context, rules);
  check_count(rules, "data.batch_sequences", c.batch_sequences, 1);
  check_count(rules, "data.validation_windows", c.validation_windows, 1);
  if (c.batch_sequences < 1 || c.batch_sequences > kMaxCount) return;
  const bool divides =
      c.micro_batch_sequences >= 1 && c.batch_sequences % c.micro_batch_sequences == 0;
  rules.require(divides, "data.micro_batch_sequences", c.micro_batch_sequences,
                divides ? 0 : divisor_below(c.batch_sequences, c.micro_batch_sequences),
                "must divide data.batch_sequences = {}", c.batch_sequences);
  if (!divides || c.context < 1 || c.context > kMaxCount) return;
  constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 1;  // row ids are 32 bit
  rules.require(c.micro_batch_sequences <= kMaxRows / c.context,
                "data.micro_batch_sequences x data.context",
                fmt::format("{} x {}", c.micro_batch_sequences, c.context), "fewer sequences",
                "must be at most {}", kMaxRows);
  rules.require(c.batch_sequences <= kMaxStepTokens / c.context,
                "data.batch_sequences x data.context",
                fmt::format("{} x {}", c.batch_sequences, c.context), "fewer sequences",
                "must be at most {}", kMaxStepTokens);
}

DocumentsConfig read_documents(const json& object, std::int64_t context, Rules& rules) {
  JsonReader reader(object, "data.documents", rules);
  DocumentsConfig c;
  if (reader.has("separator")) c.separator = reader.string("separator");
  c.max_documents = std::clamp<std::int64_t>(context, 1, kMaxCount);
  optional(reader, "max_documents", c.max_documents);
  optional(reader, "length_multiple", c.length_multiple);
  reader.finish();
  return c;
}

DataConfig read_data(const json& object, const model::ModelConfig& model, Purpose purpose,
                     Rules& rules) {
  JsonReader reader(object, "data", rules);
  DataConfig c;
  if (purpose == Purpose::kRun || reader.has("path")) {
    c.path = reader.string("path");
    rules.require(!c.path.empty(), "data.path", "\"\"", "data/kjv.txt", "must name a text file");
  }
  optional(reader, "validation_fraction", c.validation_fraction);
  c.context = reader.integer("context");
  if (reader.has("documents")) {
    c.documents = read_documents(reader.object("documents"), c.context, rules);
  }
  c.batch_sequences = reader.integer("batch_sequences");
  c.micro_batch_sequences = c.batch_sequences;
  optional(reader, "micro_batch_sequences", c.micro_batch_sequences);
  optional(reader, "validation_windows", c.validation_windows);
  reader.finish();
  check_data(c, model, rules);
  return c;
}

ParallelConfig read_parallel(const json& object, Rules& rules) {
  JsonReader reader(object, "parallel", rules);
  ParallelConfig c;
  optional(reader, "cp", c.cp);
  const bool open = !reader.has("dp");
  if (!open) c.dp = reader.integer("dp");
  reader.finish();
  check_count(rules, "parallel.cp", c.cp, 1);
  if (!open) check_count(rules, "parallel.dp", c.dp, 1);
  return c;
}

OptimizerConfig read_optimizer(const json& object, Rules& rules) {
  JsonReader reader(object, "optimizer", rules);
  OptimizerConfig c;
  optional(reader, "beta1", c.beta1);
  optional(reader, "beta2", c.beta2);
  optional(reader, "epsilon", c.epsilon);
  optional(reader, "weight_decay", c.weight_decay);
  optional(reader, "clip_norm", c.clip_norm);
  reader.finish();
  check_range(rules, "optimizer.beta1", c.beta1, 0, 1, 0.9);
  check_range(rules, "optimizer.beta2", c.beta2, 0, 1, 0.95);
  check_positive(rules, "optimizer.epsilon", c.epsilon, 1e-8);
  check_range(rules, "optimizer.weight_decay", c.weight_decay, 0, 1e3, 0.1);
  check_positive(rules, "optimizer.clip_norm", c.clip_norm, 1);
  return c;
}

void check_stage(const StageConfig& c, const std::string& path, const model::ModelConfig& model,
                 Rules& rules) {
  rules.require(!c.name.empty(), path + ".name", "", "\"sparse\"", "must not be empty");
  check_count(rules, path + ".steps", c.steps, 1);
  check_positive(rules, path + ".learning_rate", c.learning_rate, 1e-3);
  rules.require(c.final_learning_rate >= 0 && c.final_learning_rate <= c.learning_rate,
                path + ".final_learning_rate", c.final_learning_rate, c.learning_rate,
                "must be from 0 to learning_rate = {}", c.learning_rate);
  rules.require(c.warmup_steps >= 0 && c.warmup_steps <= c.steps, path + ".warmup_steps",
                c.warmup_steps, c.warmup_steps < 0 ? 0 : c.steps, "must be from 0 to steps = {}",
                c.steps);
  const std::string coefficient = path + ".index_loss_coefficient";
  check_range(rules, coefficient, c.index_loss_coefficient, 0, 1e6, 0.01);
  const bool learns = c.index_loss_coefficient > 0;
  rules.require(c.attention != AttentionMode::kDense || !learns, coefficient,
                c.index_loss_coefficient, 0,
                "must be 0 in a dense stage, where the indexer does not run");
  rules.require(c.attention != AttentionMode::kWarmup || learns, coefficient,
                c.index_loss_coefficient, 1,
                "must be positive in a warmup stage, which trains nothing but the indexers");
  const attention::IndexerConfig& indexer = model.attention.indexer;
  const bool warmup = c.attention == AttentionMode::kWarmup;
  rules.require(!indexer.pools() || !warmup, path + ".attention", "\"warmup\"", "\"sparse\"",
                "must not be a warm-up with attention.indexer.pool_size = {}: indexers of pools do "
                "not learn",
                indexer.pool_size);
  rules.require(!indexer.pools() || warmup || !learns, coefficient, c.index_loss_coefficient, 0,
                "must be 0 with attention.indexer.pool_size = {}: indexers of pools do not learn",
                indexer.pool_size);
  const std::string mtp = path + ".mtp_loss_coefficient";
  check_range(rules, mtp, c.mtp_loss_coefficient, 0, 1e6, kMtpLossCoefficient);
  const bool ahead = c.mtp_loss_coefficient > 0;
  rules.require(!ahead || model.mtp_depths > 0, mtp, c.mtp_loss_coefficient, 0,
                "must be 0 for a model without mtp_depths");
  rules.require(!ahead || !warmup, mtp, c.mtp_loss_coefficient, 0,
                "must be 0 in a warmup stage, which trains nothing but the indexers");
}

// A list of names, each at most once.
model::Recompute read_recompute(JsonReader& reader, const model::ModelConfig& model) {
  model::Recompute r;
  const std::vector<std::pair<std::string, bool*>> parts = recompute_parts(r);
  if (reader.has("recompute")) {
    for (const std::string& name : reader.strings("recompute")) {
      const auto part =
          std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return p.first == name; });
      const bool known = part != parts.end();
      reader.rules().require(known, "recompute", fmt::format("\"{}\"", name), "[\"full\"]",
                             "may name \"full\", or any of \"core_attention\", \"norms\", \"mlp\" "
                             "and \"query_up_projection\"");
      if (!known) continue;
      reader.rules().require(!*part->second, "recompute", fmt::format("\"{}\" twice", name),
                             fmt::format("\"{}\" once", name), "must name each part once");
      *part->second = true;
    }
  }
  if (reader.has("reuse_checkpoint_topk")) {
    r.reuse_checkpoint_topk = reader.boolean("reuse_checkpoint_topk");
  }
  check(r, model, reader.rules());
  return r;
}

json write_recompute(const model::Recompute& recompute) {
  model::Recompute r = recompute;
  json names = json::array();
  for (const auto& [name, on] : recompute_parts(r)) {
    if (*on) names.push_back(name);
  }
  return names;
}

StageConfig read_stage(const json& object, const std::string& path, const model::ModelConfig& model,
                       Purpose purpose, Rules& rules) {
  JsonReader reader(object, path, rules);
  StageConfig c;
  c.name = reader.string("name");
  c.attention = reader.word("attention", kModes);
  c.steps = 1;
  c.learning_rate = 1e-3;
  if (purpose == Purpose::kRun || reader.has("steps")) c.steps = reader.integer("steps");
  if (purpose == Purpose::kRun || reader.has("learning_rate")) {
    c.learning_rate = reader.number("learning_rate");
  }
  c.final_learning_rate = c.learning_rate;
  optional(reader, "final_learning_rate", c.final_learning_rate);
  optional(reader, "warmup_steps", c.warmup_steps);
  optional(reader, "index_loss_coefficient", c.index_loss_coefficient);
  const bool looks_ahead = model.mtp_depths > 0 && c.attention != AttentionMode::kWarmup;
  c.mtp_loss_coefficient = looks_ahead ? kMtpLossCoefficient : 0;
  optional(reader, "mtp_loss_coefficient", c.mtp_loss_coefficient);
  reader.finish();
  check_stage(c, path, model, rules);
  return c;
}

std::string compare(const json& a, const json& b, const std::string& path) {
  if (a.is_object() && b.is_object()) {
    for (const auto& [key, value] : a.items()) {
      std::string full = path.empty() ? key : fmt::format("{}.{}", path, key);
      if (!b.contains(key)) return full;
      if (std::string found = compare(value, b[key], full); !found.empty()) return found;
    }
    for (const auto& [key, value] : b.items()) {
      if (!a.contains(key)) return path.empty() ? key : fmt::format("{}.{}", path, key);
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
  Rules strict;
  return read_train_config(object, Purpose::kRun, strict);
}

TrainConfig read_train_config(const json& object, Purpose purpose, Rules& rules) {
  const bool run = purpose == Purpose::kRun;
  JsonReader reader(object, "", rules);
  TrainConfig c;
  c.model = model::read_model_config(reader.object("model"), rules);
  c.data = read_data(reader.object("data"), c.model, purpose, rules);
  if (reader.has("optimizer")) c.optimizer = read_optimizer(reader.object("optimizer"), rules);
  const json& stages = reader.array("stages");
  rules.require(!stages.empty(), "stages", "[]", "one stage", "must hold at least one stage");
  for (std::size_t i = 0; i < stages.size(); ++i) {
    c.stages.push_back(
        read_stage(stages[i], fmt::format("stages[{}]", i), c.model, purpose, rules));
    const attention::IndexerConfig& indexer = c.model.attention.indexer;
    if (indexer.precision == attention::SelectionPrecision::kMxfp8) {
      const std::string missing =
          missing_for_precision(indexer, DType::kF32, c.stages.back().attention);
      rules.require(missing.empty(), "model.attention.indexer.precision", "", "\"full\"",
                    "\"mxfp8\" in stages[{}] needs {}", i, missing);
    }
    if (!rules.kept()) continue;  // steps that are none cannot be added
    rules.require(total_steps(c) <= kMaxSteps, "the sum of all steps", total_steps(c), kMaxSteps,
                  "must be at most {}", kMaxSteps);
  }
  if (reader.has("parallel")) c.parallel = read_parallel(reader.object("parallel"), rules);
  if (rules.kept() && c.parallel.dp > 0) check_parallel(c, rules);
  c.recompute = read_recompute(reader, c.model);
  optional(reader, "checkpoint_every", c.checkpoint_every);
  optional(reader, "validate_every", c.validate_every);
  optional(reader, "health_every", c.health_every);
  std::int64_t seed = 1;
  optional(reader, "seed", seed);
  if (reader.has("initial_checkpoint")) c.initial_checkpoint = reader.string("initial_checkpoint");
  if (run || reader.has("output")) {
    c.output = reader.string("output");
    rules.require(!c.output.empty(), "output", "\"\"", "build/run", "must name a folder");
    rules.require(c.initial_checkpoint.empty() || !lies_in(c.initial_checkpoint, c.output),
                  "initial_checkpoint", c.initial_checkpoint, "the output of another run",
                  "must lie outside output, which this run writes");
  }
  if (run) {
    reader.refuse({"plan"},
                  "is read by winnow plan alone; the processes of a run are parallel.cp x "
                  "parallel.dp");
  } else {
    reader.has("plan");
  }
  reader.finish();
  check_count(rules, "checkpoint_every", c.checkpoint_every, 0);
  check_count(rules, "validate_every", c.validate_every, 0);
  check_count(rules, "health_every", c.health_every, 0);
  check_count(rules, "seed", seed, 0);
  c.seed = static_cast<std::uint64_t>(seed);
  rules.require(!run || c.model.vocab_size == 256, "model.vocab_size", c.model.vocab_size, 256,
                "must be 256 for text read as bytes");
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
                      {"index_loss_coefficient", s.index_loss_coefficient},
                      {"mtp_loss_coefficient", s.mtp_loss_coefficient}});
  }
  json data = {{"path", c.data.path},
               {"validation_fraction", c.data.validation_fraction},
               {"context", c.data.context},
               {"batch_sequences", c.data.batch_sequences},
               {"micro_batch_sequences", c.data.micro_batch_sequences},
               {"validation_windows", c.data.validation_windows}};
  if (const auto& documents = c.data.documents) {
    data["documents"] = {{"separator", documents->separator},
                         {"max_documents", documents->max_documents},
                         {"length_multiple", documents->length_multiple}};
  }
  json parallel = {{"cp", c.parallel.cp}};
  if (c.parallel.dp > 0) parallel["dp"] = c.parallel.dp;
  return {{"model", model::write_model_config(c.model)},
          {"data", data},
          {"optimizer",
           {{"beta1", c.optimizer.beta1},
            {"beta2", c.optimizer.beta2},
            {"epsilon", c.optimizer.epsilon},
            {"weight_decay", c.optimizer.weight_decay},
            {"clip_norm", c.optimizer.clip_norm}}},
          {"stages", stages},
          {"parallel", parallel},
          {"recompute", write_recompute(c.recompute)},
          {"reuse_checkpoint_topk", c.recompute.reuse_checkpoint_topk},
          {"checkpoint_every", c.checkpoint_every},
          {"validate_every", c.validate_every},
          {"health_every", c.health_every},
          {"seed", c.seed},
          {"initial_checkpoint", c.initial_checkpoint},
          {"output", c.output}};
}

json read_config_file(const std::filesystem::path& path) {
  const std::string text = read_file(kOperation, path);
  try {
    return json::parse(text);
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
  }
}

TrainConfig read_train_config_file(const std::filesystem::path& path) {
  const json object = read_config_file(path);
  try {
    return read_train_config(object);
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
    for (const char* key : {"checkpoint_every", "validate_every", "health_every", "output",
                            "recompute", "reuse_checkpoint_topk"}) {
      object.erase(key);
    }
    object["data"].erase("validation_windows");
    object["data"].erase("path");  // the text itself is compared (train/checkpoint.h)
    return object;
  };
  return compare(deciding(a), deciding(b), "");
}

std::string first_difference(const json& a, const json& b) { return compare(a, b, ""); }

void check_parallel(const TrainConfig& c, Rules& rules) {
  const std::int64_t batch = c.data.batch_sequences, dp = c.parallel.dp;
  rules.require(batch % dp == 0, "data.batch_sequences", batch, multiple_above(batch, dp),
                "must be a multiple of parallel.dp = {}, which share them; parallel.cp (--cp) "
                "would share the rows of each",
                dp);
  if (batch % dp != 0) return;
  const std::int64_t share = sequences_of_a_rank(c), at_once = sequences_at_once(c);
  rules.require(
      share % at_once == 0, "data.micro_batch_sequences", at_once, divisor_below(share, at_once),
      "must divide data.batch_sequences / parallel.dp = {}, what a rank has of them", share);
}

std::int64_t sequences_of_a_rank(const TrainConfig& c) {
  return c.data.batch_sequences / std::max<std::int64_t>(1, c.parallel.dp);
}

std::int64_t sequences_at_once(const TrainConfig& c) {
  return std::min(c.data.micro_batch_sequences, sequences_of_a_rank(c));
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
