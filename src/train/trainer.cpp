#include "train/trainer.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <span>

#include "base/check.h"
#include "base/hash.h"
#include "comm/agree.h"
#include "comm/collectives.h"
#include "model/cut_batch.h"
#include "train/initial_weights.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using attention::AttentionMode;
using Clock = std::chrono::steady_clock;

constexpr const char* kOperation = "train";

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Without a loss of their own indexers stand still: weight decay does not touch them, either.
Trained trained_in(const StageConfig& stage) {
  return {stage.attention != AttentionMode::kWarmup, stage.index_loss_coefficient > 0};
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

// What a rank adds to a step's losses: sums over its rows. Of a size that the model alone decides, so
// that every rank has the same whatever its rows and whatever the stage trains.
class StepSums {
 public:
  explicit StepSums(const model::ModelConfig& config)
      : layers_(model::index_layers(config).size()),
        sums_(1 + layers_ + static_cast<std::size_t>(config.mtp_depths)) {}

  void add(const model::StepResult& result) {
    layers_ran_ = result.index_kl.size();
    depths_ran_ = result.mtp_nll.size();
    sums_[0] += result.nll;
    add(result.index_kl, index_kl());
    add(result.mtp_nll, mtp_nll());
  }
  std::span<double> all() { return sums_; }
  double nll() const { return sums_[0]; }
  // Of those that ran.
  std::span<double> index_kl() { return all().subspan(1, layers_ran_); }
  std::span<double> mtp_nll() { return all().subspan(1 + layers_, depths_ran_); }

 private:
  static void add(const std::vector<double>& more, std::span<double> sums) {
    for (std::size_t i = 0; i < more.size(); ++i) sums[i] += more[i];
  }

  std::size_t layers_, layers_ran_ = 0, depths_ran_ = 0;
  std::vector<double> sums_;
};

void sum_gradients(const ParameterList& parameters, Trained trained, Communicator& world) {
  std::vector<std::span<float>> gradients;
  for (const auto& p : parameters.all()) {
    if (!(p->indexer ? trained.indexers : trained.model)) continue;
    gradients.emplace_back(p->grad.as<float>(), static_cast<std::size_t>(p->grad.elements()));
  }
  comm::sum(world, gradients);
}

// A number that differs where the weights do.
std::uint64_t fingerprint(const ParameterList& parameters) {
  std::uint64_t print = parameters.all().size();
  for (const auto& p : parameters.all()) {
    const auto* bits = p->value.as<std::uint32_t>();
    for (std::int64_t i = 0; i < p->value.elements(); ++i) print = hash_with(print, bits[i]);
  }
  return print;
}

// Every rank makes the same update, so this cannot happen, unless a machine computes otherwise.
void check_same_weights(const Ranks& ranks, const ParameterList& parameters) {
  if (ranks.world().size() == 1) return;
  const std::uint64_t mine = fingerprint(parameters);
  const std::string first = comm::text_of_first(ranks.world(), std::to_string(mine));
  comm::together(ranks.world(), [&] {
    WINNOW_CHECK(kOperation, std::to_string(mine) == first,
                 "the weights differ from those of rank 0: its machine computes otherwise (another "
                 "processor, another system library, broken memory); nothing was saved");
  });
}

}  // namespace

StepLosses compute_gradients(model::Transformer& model, const TextData& data,
                             const TrainConfig& config, std::int64_t step, const Ranks& ranks) {
  const StageConfig& stage = config.stages[stage_position(config, step).stage];
  StepLosses losses;
  losses.tokens = data.training_targets(config.seed, step, 0);
  const auto rows = static_cast<double>(losses.tokens);
  model::StepOptions options;
  options.mode = stage.attention;
  options.loss_scale = 1 / rows;
  options.index_loss_scale = stage.index_loss_coefficient / rows;

  options.recompute = config.recompute;
  const std::int64_t depths = config.model.mtp_depths;
  std::vector<double> depth_tokens;  // a depth has no target in the last rows of a document
  for (std::int64_t d = 0; d < depths; ++d) {
    depth_tokens.push_back(
        std::max(1.0, static_cast<double>(data.training_targets(config.seed, step, d + 1))));
    if (stage.mtp_loss_coefficient == 0) continue;
    options.mtp_loss_scales.push_back(stage.mtp_loss_coefficient / static_cast<double>(depths) /
                                      depth_tokens.back());
  }

  model.parameters().zero_grad();
  StepSums sums(config.model);
  const std::int64_t mine = sequences_of_a_rank(config), at_once = sequences_at_once(config);
  const std::int64_t begin = ranks.share() * mine;
  for (std::int64_t first = begin; first < begin + mine; first += at_once) {
    model::Batch batch = data.training_batch(config.seed, step, first, at_once);
    add_mtp_tokens(batch, depths);
    sums.add(model.step(share_batch(std::move(batch), ranks.context()), options));
  }
  const Trained trained = trained_in(stage);
  sum_gradients(model.parameters(), trained, ranks.world());
  comm::sum(ranks.world(), sums.all());

  if (trained.model) losses.loss = sums.nll() / rows;
  for (const double kl : sums.index_kl()) losses.index_kl.push_back(kl / rows);
  for (std::size_t d = 0; d < sums.mtp_nll().size(); ++d) {
    losses.mtp_loss.push_back(sums.mtp_nll()[d] / depth_tokens[d]);
  }
  return losses;
}

Trainer::Trainer(TrainConfig config, Begin begin)
    : Trainer(std::move(config), begin, single_communicator()) {}

Trainer::Trainer(TrainConfig config, Begin begin, std::unique_ptr<Communicator> alone)
    : Trainer(std::move(config), begin, *alone) {
  alone_ = std::move(alone);
}

Trainer::Trainer(TrainConfig config, Begin begin, Communicator& world)
    : config_(comm::together(world, [&] { return for_ranks(config, world.size()); })),
      ranks_(world, config_.parallel),
      output_(config_.output),
      data_(comm::together(world, [&] { return TextData(config_.data); })),
      model_(comm::together(
          world, [&] { return model::Transformer(config_.model, DType::kF32, config_.seed); })),
      optimizer_(
          comm::together(world, [&] { return AdamW(model_.parameters(), config_.optimizer); })) {
  check_same_run(ranks_, config_, data_.fingerprint(), static_cast<int>(begin));
  state_.config = config_;
  state_.text_fingerprint = data_.fingerprint();
  comm::together(world, [&] {
    if (ranks_.first()) open_run(begin);
  });
  share_state();
}

void Trainer::open_run(Begin begin) {
  open_output();
  if (begin == Begin::kResume || begin == Begin::kResumeOnOtherRanks) {
    restore(begin == Begin::kResumeOnOtherRanks);
  } else {
    if (begin == Begin::kNew && holds_run(output_)) {
      fail(Status::kInvalidArgument, kOperation,
           "{} holds a run already: continue it with --resume, or choose another output folder",
           output_.string());
    }
    if (!config_.initial_checkpoint.empty()) begin_with_weights();
    if (begin == Begin::kOver) remove_checkpoints(output_);  // once nothing else can fail
  }
  metrics_ = std::make_unique<MetricsLog>(metrics_path(), state_.step);
}

// All go on from what rank 0 has, also where it begins: initial weights pass through functions of
// the system's library, which need not agree between machines.
void Trainer::share_state() {
  Communicator& world = ranks_.world();
  if (world.size() == 1) return;
  const auto share = [&](const Tensor& t) {
    world.broadcast(
        {t.as<std::byte>(), static_cast<std::size_t>(t.elements() * dtype_bytes(t.dtype))}, 0);
  };
  for (const auto& p : model_.parameters().all()) share(p->value);
  for (const model::NamedTensor& t : optimizer_.state()) share(t.tensor);
  share(make_tensor(&state_.step, DType::kI64, {1}));
  share(make_tensor(&state_.train_seconds, DType::kF64, {1}));
  saved_step_ = state_.step > 0 ? state_.step : saved_step_;
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

void Trainer::restore(bool other_ranks) {
  std::vector<std::string> damaged;
  const std::optional<Checkpoint> checkpoint = newest_checkpoint(output_, damaged);
  note_damaged(damaged);
  if (!checkpoint) {
    fail(Status::kIo, kOperation, "there is no whole checkpoint in {} to resume from{}{}",
         output_.string(), damaged.empty() ? ": leave --resume out to begin" : "; the newest: ",
         damaged.empty() ? "" : damaged.front());
  }
  TrainConfig old = checkpoint->state.config;
  if (old.parallel.dp == 0) old.parallel.dp = 1;  // from before there were several processes
  const ParallelConfig &then = old.parallel, &now = config_.parallel;
  WINNOW_CHECK(
      kOperation, other_ranks || (then.cp == now.cp && then.dp == now.dp),
      "the run in {} has {} processes (cp {} x dp {}), these are {} (cp {} x dp {}): start "
      "as many, or go on with these by --resume --other-ranks, where sums over ranks are "
      "rounded otherwise",
      output_.string(), then.cp * then.dp, then.cp, then.dp, now.cp * now.dp, now.cp, now.dp);
  old.parallel = now;
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

void Trainer::begin_with_weights() {
  const InitialWeights initial = load_initial_weights(config_.initial_checkpoint, model_);
  note_damaged(initial.damaged);
  const auto indexers = std::ssize(model::index_layers(config_.model));
  messages_.push_back(fmt::format("the weights are those of {}; {} of {} indexers are new",
                                  initial.checkpoint.string(), initial.new_indexers, indexers));
}

void Trainer::note_damaged(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    messages_.push_back("passed over a damaged checkpoint: " + error);
  }
}

StepReport Trainer::step() {
  const StagePosition position = stage_position(config_, state_.step);
  const StageConfig& stage = config_.stages[position.stage];
  const Clock::time_point begin = Clock::now();
  StepReport report;
  report.losses = compute_gradients(model_, data_, config_, state_.step, ranks_);
  report.learning_rate = learning_rate(stage, position.step);
  report.gradient_norms = comm::together(
      ranks_.world(), [&] { return optimizer_.step(report.learning_rate, trained_in(stage)); });
  report.seconds = seconds_since(begin);
  report.step = ++state_.step;
  state_.train_seconds += report.seconds;
  report.total_steps = total_steps(config_);
  report.stage = stage.name;
  report.tokens_per_second = static_cast<double>(report.losses.tokens) / report.seconds;

  nlohmann::ordered_json line = {{"step", report.step}, {"stage", stage.name}};
  if (config_.data.documents)
    line["tokens"] = report.losses.tokens;  // the rest of its rows is padding
  if (report.losses.loss) line["loss"] = *report.losses.loss;
  if (!report.losses.mtp_loss.empty()) line["mtp_loss"] = report.losses.mtp_loss;
  if (!report.losses.index_kl.empty()) {
    line["index_loss"] = mean(report.losses.index_kl);
    line["index_kl"] = by_layer(config_.model, report.losses.index_kl);
  }
  line["learning_rate"] = report.learning_rate;
  if (trained_in(stage).model) line["grad_norm"] = report.gradient_norms.model;
  if (trained_in(stage).indexers) {
    line["index_grad_norm"] = report.gradient_norms.indexers;
  }
  line["timing"] = {{"seconds", report.seconds}, {"tokens_per_second", report.tokens_per_second}};
  write(line);
  return report;
}

void Trainer::write(const nlohmann::ordered_json& line) {
  comm::together(ranks_.world(), [&] {
    if (ranks_.first()) metrics_->append(line);
  });
}

// A dense stage is measured densely, the others through the selection.
void Trainer::validate(const Observer& observer) {
  const StageConfig& stage = config_.stages[stage_position(config_, state_.step - 1).stage];
  validate(observer, stage.name, stage.attention != AttentionMode::kDense);
}

void Trainer::validate(const Observer& observer, const std::string& stage, bool sparse) {
  const Evaluation e =
      evaluate(model_, data_, sparse ? AttentionMode::kSparse : AttentionMode::kDense,
               config_.data.validation_windows, sparse, ranks_);
  nlohmann::ordered_json line = {{"step", state_.step}, {"stage", stage}};
  line["validation"] = {{"attention", sparse ? "sparse" : "dense"},
                        {"bits_per_byte", e.bits_per_byte}};
  if (!e.mtp_bits_per_byte.empty()) line["validation"]["mtp_bits_per_byte"] = e.mtp_bits_per_byte;
  if (sparse) line["validation"]["attention_mass_caught"] = e.attention_mass_caught;
  write(line);
  if (observer.on_message) {
    observer.on_message(fmt::format("step {}: {:.3f} bits per byte on held-out text ({})",
                                    state_.step, e.bits_per_byte, sparse ? "sparse" : "dense"));
  }
}

// A dense stage has no selection to measure. One context group reads the window; the others wait.
void Trainer::measure_health() {
  const StageConfig& stage = config_.stages[stage_position(config_, state_.step - 1).stage];
  if (stage.attention == AttentionMode::kDense) return;
  Health health;
  if (ranks_.share() == 0) health = health_.measure(model_, data_, ranks_);
  nlohmann::ordered_json line = {{"step", state_.step}, {"stage", stage.name}};
  line["health"]["attention_mass_caught"] = health.attention_mass_caught;
  if (!health.selection_overlap.empty()) {
    line["health"]["selection_overlap"] = by_layer(config_.model, health.selection_overlap);
  }
  write(line);
}

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  check_same_weights(ranks_, model_.parameters());
  comm::together(ranks_.world(), [&] {
    if (!ranks_.first()) return;
    metrics_->sync();
    save_checkpoint(output_, state_, model_.parameters(), optimizer_, health_.state());
  });
  saved_step_ = state_.step;
}

bool Trainer::run(const Observer& observer) {
  if (observer.on_message) {
    for (const std::string& message : messages_) observer.on_message(message);
  }
  const std::int64_t total = total_steps(config_);
  // What the weights can do before this run changes them.
  if (state_.step == 0 && !config_.initial_checkpoint.empty()) {
    validate(observer, config_.stages[0].name, false);
  }
  while (state_.step < total) {
    const StepReport report = step();
    if (observer.on_step) observer.on_step(report);
    const bool stop = comm::any(ranks_.world(), observer.stop && observer.stop());
    const auto due = [&](std::int64_t every) { return every > 0 && state_.step % every == 0; };
    if (due(config_.validate_every)) validate(observer);
    if (due(config_.health_every)) measure_health();
    if (due(config_.checkpoint_every) || stop || state_.step == total) save();
    if (stop && state_.step < total) return false;
  }
  return true;
}

}  // namespace winnow::train
