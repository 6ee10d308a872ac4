#include "train/trainer.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>

#include "base/check.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using attention::AttentionMode;
using Clock = std::chrono::steady_clock;

constexpr const char* kOperation = "train";

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Trained trained_in(AttentionMode mode) {
  return {mode != AttentionMode::kWarmup, mode != AttentionMode::kDense};
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Values of the layers that own an indexer, at their places among all; null for those that reuse.
nlohmann::json by_layer(const model::ModelConfig& config, const std::vector<double>& values) {
  const std::vector<std::int64_t> owners = model::index_layers(config);
  nlohmann::json all = nlohmann::json::array();
  for (std::size_t i = 0; i < values.size(); ++i) {
    while (static_cast<std::int64_t>(all.size()) < owners[i]) all.push_back(nullptr);
    all.push_back(values[i]);
  }
  while (static_cast<std::int64_t>(all.size()) < config.layers) all.push_back(nullptr);
  return all;
}

}  // namespace

StepLosses compute_gradients(model::Transformer& model, const TextData& data,
                             const TrainConfig& config, std::int64_t step) {
  const StageConfig& stage = config.stages[stage_position(config, step).stage];
  const auto targets = [&](std::int64_t ahead) {
    return static_cast<double>(data.training_targets(config.seed, step, ahead));
  };
  const double rows = targets(0);
  model::StepOptions options;
  options.mode = stage.attention;
  options.loss_scale = 1 / rows;
  options.index_loss_scale = stage.index_loss_coefficient / rows;

  options.recompute = config.recompute;
  const std::int64_t depths = config.model.mtp_depths;
  std::vector<double> depth_tokens;  // a depth has no target in the last rows of a document
  for (std::int64_t d = 0; d < depths; ++d) {
    depth_tokens.push_back(std::max(1.0, targets(d + 1)));
    if (stage.mtp_loss_coefficient == 0) continue;
    options.mtp_loss_scales.push_back(stage.mtp_loss_coefficient / static_cast<double>(depths) /
                                      depth_tokens.back());
  }

  model.parameters().zero_grad();
  double nll = 0;
  StepLosses losses;
  const auto add = [](std::vector<double>& sums, const std::vector<double>& more) {
    sums.resize(more.size());
    for (std::size_t i = 0; i < more.size(); ++i) sums[i] += more[i];
  };
  const std::int64_t at_once = config.data.micro_batch_sequences;
  for (std::int64_t first = 0; first < config.data.batch_sequences; first += at_once) {
    model::Batch batch = data.training_batch(config.seed, step, first, at_once);
    add_mtp_tokens(batch, depths);
    const model::StepResult result = model.step(batch, options);
    nll += result.nll;
    add(losses.index_kl, result.index_kl);
    add(losses.mtp_loss, result.mtp_nll);
  }
  for (double& kl : losses.index_kl) kl /= rows;
  for (std::size_t d = 0; d < losses.mtp_loss.size(); ++d) losses.mtp_loss[d] /= depth_tokens[d];
  if (stage.attention != AttentionMode::kWarmup) losses.loss = nll / rows;
  return losses;
}

Trainer::Trainer(TrainConfig config, Begin begin)
    : config_(std::move(config)),
      output_(config_.output),
      data_(config_.data),
      model_(config_.model, DType::kF32, config_.seed),
      optimizer_(model_.parameters(), config_.optimizer) {
  state_.config = config_;
  state_.text_fingerprint = data_.fingerprint();
  open_output();
  if (begin == Begin::kResume) {
    restore();
  } else if (begin == Begin::kOver) {
    remove_checkpoints(output_);
  } else if (holds_run(output_)) {
    fail(Status::kInvalidArgument, kOperation,
         "{} holds a run already: continue it with --resume, or choose another output folder",
         output_.string());
  }
  metrics_ = std::make_unique<MetricsLog>(metrics_path(), state_.step);
}

// One process at a time writes into an output folder.
void Trainer::open_output() {
  make_folder(kOperation, output_);
  const fs::path path = output_ / ".lock";
  lock_ = FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (lock_.get() < 0) {
    fail(Status::kIo, kOperation, "cannot write {}: {}", path.string(), system_reason(errno));
  }
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    fail(Status::kIo, kOperation,
         "another process trains into {}: wait for it or choose another output folder",
         output_.string());
  }
}

void Trainer::restore() {
  const std::optional<Checkpoint> checkpoint = newest_checkpoint(output_, damaged_);
  if (!checkpoint) {
    fail(Status::kIo, kOperation, "there is no whole checkpoint in {} to resume from{}{}",
         output_.string(), damaged_.empty() ? ": leave --resume out to begin" : "; the newest: ",
         damaged_.empty() ? "" : damaged_.front());
  }
  const TrainConfig& old = checkpoint->state.config;
  const std::string difference = first_difference(old, config_);
  WINNOW_CHECK(kOperation, difference.empty(),
               "{} of the configuration differs from the run in {}: resume it with its own "
               "configuration, or choose another output folder",
               difference, output_.string());
  WINNOW_CHECK(kOperation, checkpoint->state.text_fingerprint == data_.fingerprint(),
               "data.path: the text in {} differs from the one that the run in {} was reading",
               config_.data.path, output_.string());
  load_parameters(checkpoint->folder / "model.safetensors", model_.parameters());
  load_optimizer(checkpoint->folder / "optimizer.safetensors", optimizer_);
  if (fs::exists(checkpoint->folder / "health.safetensors")) {
    health_.restore(checkpoint->folder / "health.safetensors", config_.model);
  }
  state_.step = saved_step_ = checkpoint->state.step;
  state_.train_seconds = checkpoint->state.train_seconds;
}

StepReport Trainer::step() {
  const StagePosition position = stage_position(config_, state_.step);
  const StageConfig& stage = config_.stages[position.stage];
  const std::int64_t tokens = data_.training_targets(config_.seed, state_.step, 0);
  const Clock::time_point begin = Clock::now();
  StepReport report;
  report.losses = compute_gradients(model_, data_, config_, state_.step);
  report.learning_rate = learning_rate(stage, position.step);
  report.gradient_norms = optimizer_.step(report.learning_rate, trained_in(stage.attention));
  report.seconds = seconds_since(begin);
  report.step = ++state_.step;
  state_.train_seconds += report.seconds;
  report.total_steps = total_steps(config_);
  report.stage = stage.name;
  report.tokens_per_second = static_cast<double>(tokens) / report.seconds;

  nlohmann::ordered_json line = {{"step", report.step}, {"stage", stage.name}};
  if (config_.data.documents) line["tokens"] = tokens;  // the rest of its rows is padding
  if (report.losses.loss) line["loss"] = *report.losses.loss;
  if (!report.losses.mtp_loss.empty()) line["mtp_loss"] = report.losses.mtp_loss;
  if (!report.losses.index_kl.empty()) {
    line["index_loss"] = mean(report.losses.index_kl);
    line["index_kl"] = by_layer(config_.model, report.losses.index_kl);
  }
  line["learning_rate"] = report.learning_rate;
  if (trained_in(stage.attention).model) line["grad_norm"] = report.gradient_norms.model;
  if (trained_in(stage.attention).indexers) {
    line["index_grad_norm"] = report.gradient_norms.indexers;
  }
  line["timing"] = {{"seconds", report.seconds}, {"tokens_per_second", report.tokens_per_second}};
  metrics_->append(line);
  return report;
}

// A dense stage is measured densely, the others through the selection.
void Trainer::validate(const Observer& observer) {
  const StagePosition position = stage_position(config_, state_.step - 1);
  const StageConfig& stage = config_.stages[position.stage];
  const bool sparse = stage.attention != AttentionMode::kDense;
  const Evaluation e =
      evaluate(model_, data_, sparse ? AttentionMode::kSparse : AttentionMode::kDense,
               config_.data.validation_windows, sparse);
  nlohmann::ordered_json line = {{"step", state_.step}, {"stage", stage.name}};
  line["validation"] = {{"attention", sparse ? "sparse" : "dense"},
                        {"bits_per_byte", e.bits_per_byte}};
  if (!e.mtp_bits_per_byte.empty()) line["validation"]["mtp_bits_per_byte"] = e.mtp_bits_per_byte;
  if (sparse) line["validation"]["attention_mass_caught"] = e.attention_mass_caught;
  metrics_->append(line);
  if (observer.on_message) {
    observer.on_message(fmt::format("step {}: {:.3f} bits per byte on held-out text ({})",
                                    state_.step, e.bits_per_byte, sparse ? "sparse" : "dense"));
  }
}

// A dense stage has no selection to measure.
void Trainer::measure_health() {
  const StageConfig& stage = config_.stages[stage_position(config_, state_.step - 1).stage];
  if (stage.attention == AttentionMode::kDense) return;
  const Health health = health_.measure(model_, data_);
  nlohmann::ordered_json line = {{"step", state_.step}, {"stage", stage.name}};
  line["health"]["attention_mass_caught"] = health.attention_mass_caught;
  if (!health.selection_overlap.empty()) {
    line["health"]["selection_overlap"] = by_layer(config_.model, health.selection_overlap);
  }
  metrics_->append(line);
}

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  metrics_->sync();
  save_checkpoint(output_, state_, model_.parameters(), optimizer_, health_.state());
  saved_step_ = state_.step;
}

bool Trainer::run(const Observer& observer) {
  if (observer.on_message) {
    for (const std::string& error : damaged_) {
      observer.on_message("passed over a damaged checkpoint: " + error);
    }
  }
  const std::int64_t total = total_steps(config_);
  while (state_.step < total) {
    const StepReport report = step();
    if (observer.on_step) observer.on_step(report);
    const bool stop = observer.stop && observer.stop();
    const auto due = [&](std::int64_t every) { return every > 0 && state_.step % every == 0; };
    if (due(config_.validate_every)) validate(observer);
    if (due(config_.health_every)) measure_health();
    if (due(config_.checkpoint_every) || stop || state_.step == total) save();
    if (stop && state_.step < total) return false;
  }
  return true;
}

}  // namespace winnow::train
