// Checkpoints: one folder each, whole or not there.
//
//   OUTPUT/checkpoints/step-00000400/config.json            the model's configuration
//                                    model.safetensors      its weights
//                                    optimizer.safetensors  moments and step counts
//                                    health.safetensors     selections measured last, if any
//                                    trainer.json           step, text, and the run's configuration
//
// A checkpoint is written into a hidden folder, brought to the disk, and then renamed. The newest
// two are kept.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/transformer.h"
#include "train/optimizer.h"

namespace winnow::train {

struct TrainerState {
  std::int64_t step = 0;               // steps done
  double train_seconds = 0;            // spent in them
  std::uint64_t text_fingerprint = 0;  // of the text file (train/data.h)
  TrainConfig config;
};

struct Checkpoint {
  std::filesystem::path folder;
  TrainerState state;
};

// Returns the new checkpoint's folder. A failure (full disk) leaves the older ones as they were.
std::filesystem::path save_checkpoint(const std::filesystem::path& output,
                                      const TrainerState& state, const ParameterList& parameters,
                                      const AdamW& optimizer,
                                      const std::vector<model::NamedTensor>& health = {});

// All under `output`, whole or damaged.
void remove_checkpoints(const std::filesystem::path& output);

// There is a checkpoint under `output`, whole or damaged. What a kill left of one that was being
// written does not count.
bool holds_run(const std::filesystem::path& output);

// The newest whole checkpoint under `output`: its files are read and their checksums compared. A
// damaged one, which only something else than winnow can have made, is passed over, with its error
// appended to `damaged`.
std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& output,
                                            std::vector<std::string>& damaged);

// Into a model of the same configuration.
void load_parameters(const std::filesystem::path& file, ParameterList& parameters);
void load_optimizer(const std::filesystem::path& file, AdamW& optimizer);

// The folder itself if it is a checkpoint's (it has a config.json), or the newest whole checkpoint of
// a run's output folder, with the errors of those that were passed over appended to `damaged`. None
// is an error.
std::filesystem::path find_checkpoint(const std::filesystem::path& folder,
                                      std::vector<std::string>& damaged);

// What a checkpoint's folder holds: the trainer's state, the model's configuration, the model.
TrainerState read_trainer_state(const std::filesystem::path& checkpoint);
model::ModelConfig load_model_config(const std::filesystem::path& checkpoint);
model::Transformer load_model(const std::filesystem::path& checkpoint);

}  // namespace winnow::train
