#include "train/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "model/json_reader.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kOperation = "checkpoint";
constexpr std::size_t kKept = 2;
constexpr const char* kPrefix = "step-";
constexpr const char* kWriting = ".writing";    // not whole yet
constexpr const char* kDeleting = ".deleting";  // not whole any more

// Folders of whole checkpoints, oldest first (names have a fixed width).
std::vector<fs::path> list_checkpoints(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().filename().string().rfind(kPrefix, 0) == 0) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Renamed first, so that a kill in between leaves no half of it under its name.
void remove_checkpoint(const fs::path& folder) {
  const fs::path doomed = folder.parent_path() / kDeleting;
  std::error_code error;
  fs::remove_all(doomed, error);
  fs::rename(folder, doomed, error);
  if (!error) fs::remove_all(doomed, error);
  if (error) {
    fail(Status::kIo, kOperation, "cannot remove {}: {}", folder.string(),
         system_reason(error.value()));
  }
}

std::vector<model::NamedTensor> values_of(const ParameterList& parameters) {
  std::vector<model::NamedTensor> tensors;
  for (const auto& p : parameters.all()) tensors.push_back({p->name, p->value});
  return tensors;
}

std::string json_text(const json& object) { return object.dump(2) + "\n"; }

json parse_file(const fs::path& path) {
  try {
    return json::parse(read_file(kOperation, path));
  } catch (const json::exception&) {
    fail(Status::kCorrupt, kOperation, "{} must be JSON", path.string());
  }
}

json write_state(const TrainerState& state) {
  return {{"step", state.step},
          {"train_seconds", state.train_seconds},
          {"text_fingerprint", state.text_fingerprint},
          {"config", write_train_config(state.config)}};
}

TrainerState read_state(const fs::path& path) {
  const json object = parse_file(path);
  try {
    Rules strict;
    model::JsonReader reader(object, "", strict);
    TrainerState state;
    state.step = reader.integer("step");
    state.train_seconds = reader.number("train_seconds");
    reader.has("text_fingerprint");
    state.text_fingerprint = object.at("text_fingerprint").get<std::uint64_t>();
    state.config = read_train_config(reader.object("config"));
    reader.finish();
    WINNOW_CHECK(kOperation, state.step >= 0 && state.step <= total_steps(state.config),
                 "step must be from 0 to {}, got {}", total_steps(state.config), state.step);
    return state;
  } catch (const std::exception& error) {
    fail(Status::kCorrupt, kOperation, "{}: {}", path.string(), error.what());
  }
}

// Every name of the file is in the list, and the other way round.
void load_exactly(const fs::path& path, const std::vector<model::NamedTensor>& tensors) {
  const model::SafetensorsFile file(path);
  for (const model::NamedTensor& t : tensors) file.read_into(t.name, t.tensor);
  if (file.entries().size() == tensors.size()) return;
  for (const model::SafetensorsEntry& entry : file.entries()) {
    const bool known = std::any_of(tensors.begin(), tensors.end(),
                                   [&](const auto& t) { return t.name == entry.name; });
    if (!known) {
      fail(Status::kCorrupt, kOperation, "{}: tensor {} belongs to another configuration",
           path.string(), entry.name);
    }
  }
}

}  // namespace

fs::path save_checkpoint(const fs::path& output, const TrainerState& state,
                         const ParameterList& parameters, const AdamW& optimizer,
                         const std::vector<model::NamedTensor>& health) {
  const fs::path folder = output / "checkpoints", writing = folder / kWriting;
  fs::path whole = folder / fmt::format("{}{:08}", kPrefix, state.step);
  std::error_code error;
  fs::remove_all(writing, error);
  make_folder(kOperation, writing);
  try {
    write_file(kOperation, writing / "config.json",
               json_text(model::write_model_config(state.config.model)));
    write_file(kOperation, writing / "trainer.json", json_text(write_state(state)));
    model::write_safetensors(writing / "model.safetensors", values_of(parameters),
                             {{"format", "winnow"}, {"step", std::to_string(state.step)}});
    model::write_safetensors(writing / "optimizer.safetensors", optimizer.state());
    if (!health.empty()) model::write_safetensors(writing / "health.safetensors", health);
    sync_folder(kOperation, writing);
    if (fs::exists(whole)) remove_checkpoint(whole);
    fs::rename(writing, whole, error);
    if (error) {
      fail(Status::kIo, kOperation, "cannot write {}: {}", whole.string(),
           system_reason(error.value()));
    }
    sync_folder(kOperation, folder);
  } catch (...) {
    fs::remove_all(writing, error);
    throw;
  }
  std::vector<fs::path> all = list_checkpoints(folder);
  for (std::size_t i = 0; i + kKept < all.size(); ++i) remove_checkpoint(all[i]);
  return whole;
}

void remove_checkpoints(const fs::path& output) {
  for (const fs::path& folder : list_checkpoints(output / "checkpoints")) remove_checkpoint(folder);
}

bool holds_run(const fs::path& output) { return !list_checkpoints(output / "checkpoints").empty(); }

std::optional<Checkpoint> newest_checkpoint(const fs::path& output,
                                            std::vector<std::string>& damaged) {
  std::vector<fs::path> all = list_checkpoints(output / "checkpoints");
  std::reverse(all.begin(), all.end());
  for (const fs::path& folder : all) {
    try {
      model::SafetensorsFile(folder / "model.safetensors").verify();
      model::SafetensorsFile(folder / "optimizer.safetensors").verify();
      const fs::path health = folder / "health.safetensors";
      if (fs::exists(health)) model::SafetensorsFile(health).verify();
      return Checkpoint{folder, read_state(folder / "trainer.json")};
    } catch (const Error& error) {
      damaged.push_back(error.what());
    }
  }
  return std::nullopt;
}

void load_parameters(const fs::path& file, ParameterList& parameters) {
  load_exactly(file, values_of(parameters));
}

void load_optimizer(const fs::path& file, AdamW& optimizer) {
  load_exactly(file, optimizer.state());
}

fs::path find_checkpoint(const fs::path& folder, std::vector<std::string>& damaged) {
  if (fs::exists(folder / "config.json")) return folder;
  const std::size_t before = damaged.size();
  const std::optional<Checkpoint> newest = newest_checkpoint(folder, damaged);
  if (newest) return newest->folder;
  if (damaged.size() > before) throw Error(Status::kCorrupt, damaged[before]);
  fail(Status::kIo, kOperation,
       "there is no checkpoint in {}: name the output folder of a run, or a folder with "
       "config.json and model.safetensors",
       folder.string());
}

TrainerState read_trainer_state(const fs::path& checkpoint) {
  return read_state(checkpoint / "trainer.json");
}

model::ModelConfig load_model_config(const fs::path& checkpoint) {
  return model::read_model_config(parse_file(checkpoint / "config.json"));
}

model::Transformer load_model(const fs::path& checkpoint) {
  model::Transformer model(load_model_config(checkpoint), DType::kF32, 1);
  load_parameters(checkpoint / "model.safetensors", model.parameters());
  return model;
}

}  // namespace winnow::train
