// The training loop: stages, steps, metrics, checkpoints.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/checkpoint.h"
#include "train/data.h"
#include "train/evaluate.h"
#include "train/health.h"
#include "train/metrics.h"
#include "train/schedule.h"

namespace winnow::train {

// Means over one step. In the warm-up there is no language loss.
struct StepLosses {
  std::optional<double> loss;  // nats per token
  // Per layer that owns an indexer (model::index_layers), per row; empty where they do not learn.
  std::vector<double> index_kl;
  std::vector<double> mtp_loss;  // per depth, nats per token; empty where depths do not train
};

// Forward and backward of one step of the run: the parameters' gradients are those of
//   loss + index_loss_coefficient * sum over layers of index_kl
//        + mtp_loss_coefficient * mean over depths of mtp_loss,
// up to rounding the same for every cut into micro-batches.
StepLosses compute_gradients(model::Transformer& model, const TextData& data,
                             const TrainConfig& config, std::int64_t step);

struct StepReport {
  std::int64_t step = 0, total_steps = 0;  // steps done, of how many
  std::string stage;
  StepLosses losses;
  double learning_rate = 0;
  GradientNorms gradient_norms;
  double seconds = 0, tokens_per_second = 0;
};

struct Observer {
  std::function<void(const StepReport&)> on_step;
  std::function<void(const std::string&)> on_message;  // something worth a line
  std::function<bool()> stop;                          // asked after every step
};

// How a run begins, by what its output folder may hold.
enum class Begin {
  kNew,     // no run yet
  kResume,  // a run, which goes on from its newest whole checkpoint
  kOver,    // anything: the checkpoints of an older run are removed
};

class Trainer {
 public:
  // Takes the output folder for itself before it touches what is there. kResume refuses a
  // configuration that differs from the checkpoint's, with the differing key.
  Trainer(TrainConfig config, Begin begin);

  // Runs to the end (true), or until the observer stops it (false), and saves.
  bool run(const Observer& observer);

  const TrainConfig& config() const { return config_; }
  const TrainerState& state() const { return state_; }
  const TextData& data() const { return data_; }
  model::Transformer& model() { return model_; }
  std::filesystem::path metrics_path() const { return output_ / "metrics.jsonl"; }

 private:
  void open_output();
  void restore();
  StepReport step();
  void validate(const Observer& observer);
  void measure_health();
  void save();

  TrainConfig config_;
  std::filesystem::path output_;
  TextData data_;
  model::Transformer model_;
  AdamW optimizer_;
  IndexHealth health_;
  TrainerState state_;
  FileDescriptor lock_;
  std::unique_ptr<MetricsLog> metrics_;
  std::vector<std::string> damaged_;  // checkpoints that were passed over
  std::int64_t saved_step_ = -1;
};

}  // namespace winnow::train
