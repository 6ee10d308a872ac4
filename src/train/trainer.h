// The training loop: stages, steps, metrics, checkpoints; in one process or in several, which make
// every step together and of which the first writes.
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
#include "train/ranks.h"
#include "train/schedule.h"

namespace winnow::train {

// Means over one step. In the warm-up there is no language loss.
struct StepLosses {
  std::int64_t tokens = 0;     // rows of the step with a target
  std::optional<double> loss;  // nats per token
  // Per layer that owns an indexer (model::index_layers), per row; empty where they do not learn.
  std::vector<double> index_kl;
  std::vector<double> mtp_loss;  // per depth, nats per token; empty where depths do not train
};

// Forward and backward of one step of the run: the parameters' gradients are those of
//   loss + index_loss_coefficient * sum over layers of index_kl
//        + mtp_loss_coefficient * mean over depths of mtp_loss,
// up to rounding the same for every cut into micro-batches and for any number of ranks. Gradients of
// what the stage does not train are of no use, and stay each rank's own.
StepLosses compute_gradients(model::Transformer& model, const TextData& data,
                             const TrainConfig& config, std::int64_t step,
                             const Ranks& ranks = Ranks());

struct StepReport {
  std::int64_t step = 0, total_steps = 0;  // steps done, of how many
  std::string stage;
  StepLosses losses;
  double learning_rate = 0;
  GradientNorms gradient_norms;
  double seconds = 0, tokens_per_second = 0;
};

// Asked and told on every rank.
struct Observer {
  std::function<void(const StepReport&)> on_step;
  std::function<void(const std::string&)> on_message;  // something worth a line
  std::function<bool()> stop;                          // asked after every step; one rank is enough
};

// How a run begins, by what its output folder may hold.
enum class Begin {
  kNew,                 // no run yet
  kResume,              // a run, which goes on from its newest whole checkpoint
  kResumeOnOtherRanks,  // the same, of a run of any number of processes: up to rounding its curve
  kOver,                // anything: the checkpoints of an older run are removed
};

class Trainer {
 public:
  // Takes the output folder for itself before it touches what is there. Resuming refuses a
  // configuration that differs from the checkpoint's, with the differing key.
  Trainer(TrainConfig config, Begin begin);
  // Of a run of several processes, each of which makes one; `world` must outlive it. Only rank 0
  // touches the output folder. What goes wrong on one rank is thrown on all (comm::GroupError)
  // unless it happens inside a step.
  Trainer(TrainConfig config, Begin begin, Communicator& world);

  // Runs to the end (true), or until the observer stops it (false), and saves.
  bool run(const Observer& observer);

  const TrainConfig& config() const { return config_; }  // as these ranks run it
  const TrainerState& state() const { return state_; }
  const TextData& data() const { return data_; }
  model::Transformer& model() { return model_; }
  std::filesystem::path metrics_path() const { return output_ / "metrics.jsonl"; }

 private:
  Trainer(TrainConfig config, Begin begin, std::unique_ptr<Communicator> alone);

  void open_run(Begin begin);  // on rank 0
  void open_output();
  void restore(bool other_ranks);
  void begin_with_weights();
  void note_damaged(const std::vector<std::string>& errors);
  void share_state();
  StepReport step();
  void validate(const Observer& observer);
  void validate(const Observer& observer, const std::string& stage, bool sparse);
  void measure_health();
  void write(const nlohmann::ordered_json& line);
  void save();

  std::unique_ptr<Communicator> alone_;
  TrainConfig config_;
  Ranks ranks_;
  std::filesystem::path output_;
  TextData data_;
  model::Transformer model_;
  AdamW optimizer_;
  IndexHealth health_;
  TrainerState state_;
  FileDescriptor lock_;
  std::unique_ptr<MetricsLog> metrics_;  // of rank 0
  std::vector<std::string> messages_;    // of the beginning
  std::int64_t saved_step_ = -1;
};

}  // namespace winnow::train
