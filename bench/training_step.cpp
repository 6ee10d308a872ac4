// Problems of a whole training step: forward, losses and backward of a model, without the
// optimiser.
//
// The only file of bench that stands on the model floor.
#include "bench/training_step.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/cpu_features.h"
#include "base/numbers.h"
#include "base/run_first.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operations.h"
#include "model/initialise.h"
#include "model/transformer.h"
#include "ref/reader.h"

namespace winnow::bench {
namespace {

using attention::AttentionMode;

constexpr char kName[] = "training_step";

AttentionMode mode_of(const std::string& word) {
  if (word == "dense") return AttentionMode::kDense;
  return word == "warmup" ? AttentionMode::kWarmup : AttentionMode::kSparse;
}

std::vector<const char*> operations_inside(AttentionMode mode) {
  if (mode == AttentionMode::kDense) {
    return {"matmul", "sparse_attention", "sparse_attention_backward"};
  }
  if (mode == AttentionMode::kWarmup) return {"matmul", "sparse_attention", "dense_index_loss"};
  return {"matmul",
          "index_topk",
          "sparse_attention",
          "attention_target",
          "index_loss",
          "index_scores_at_backward",
          "sparse_attention_backward"};
}

// FLOPs of the linear layers: 2 per weight and token forward, 2 for the input's gradient and 2 for
// the weight's. The embedding is a table look-up; the output head is a linear layer. The indexer's
// inputs are detached: 2 forward, 2 for the weight. A warm-up runs the rest forward only, and of
// its last layer nothing that comes after the attention. To these come, in each layer, the
// operations on pairs of a row and a key, counted as in their own problems. Norms, SwiGLU, RoPE and
// the loss over the vocabulary are left out.
//
// Bytes: weights read, gradients of what is trained written, and what the layers keep for their
// backward written, each once.
Cost step_cost(const model::ModelConfig& config, AttentionMode mode, const RowRanges& ranges,
               DType dtype) {
  const attention::AttentionConfig& a = config.attention;
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double layers = number(config.layers), hidden = number(config.attention.hidden_size),
               intermediate = number(config.intermediate_size), heads = number(a.heads),
               q_lora = number(a.q_lora_rank), latent = number(a.kv_lora_rank),
               nope = number(a.qk_nope_head_dim), rope = number(a.qk_rope_head_dim),
               v = number(a.v_head_dim), index_dim = number(a.indexer.index_dim),
               index_heads = number(a.indexer.index_heads);

  // Weights, per layer: up to the attention, after it, and of the indexer.
  const double query_input = q_lora > 0 ? q_lora : hidden;
  const double before = q_lora * hidden + query_input * heads * (nope + rope) +
                        (latent + rope) * hidden + heads * nope * latent;
  const double after = heads * v * (latent + hidden) + 3 * hidden * intermediate;
  const double indexer = (query_input * index_heads + hidden) * index_dim + hidden * index_heads;
  const double body = layers * (before + after) + number(config.vocab_size) * hidden;

  // Pairs of a row and a key, per layer: visible, and selected.
  const double rows = number(ranges.rows());
  double visible = 0, selected = 0;
  for (std::size_t i = 0; i < ranges.starts.size(); ++i) {
    const std::int64_t length = ranges.ends[i] - ranges.starts[i];
    visible += number(length);
    selected += number(std::min(length, a.indexer.topk));
  }
  // FLOPs of a pair: logits; attention forward and backward; scores of the indexer.
  const double dim_qk = latent + rope, logits = 2 * heads * dim_qk;
  const double forward = logits + 2 * heads * latent;
  const double backward = 3 * logits + 4 * heads * latent;
  const double scores = 2 * index_heads * index_dim;

  // Numbers that a row of a layer leaves: the residual stream and its norm twice, both latents
  // before and after their norms, rotated keys, queries twice, attended values, heads, MLP.
  const double kept = 4 * hidden + 2 * q_lora + 2 * latent + rope +
                      heads * (nope + rope + dim_qk + latent + v) + 3 * intermediate;
  const double index_kept = (index_heads + 1) * index_dim + index_heads;
  const double size = number(dtype_bytes(dtype));

  switch (mode) {
    case AttentionMode::kDense:
      return {6 * body * rows + layers * visible * (forward + backward),
              size * (2 * body + layers * rows * kept)};
    case AttentionMode::kWarmup:
      return {2 * (layers * before + (layers - 1) * after) * rows + 4 * layers * indexer * rows +
                  layers * visible * (forward + logits + 3 * scores),
              size * (body + layers * (2 * indexer + rows * (kept + index_kept)))};
    case AttentionMode::kSparse: break;
  }
  constexpr double kLoss = 60;  // of a slot in index_loss
  return {6 * body * rows + 4 * layers * indexer * rows +
              layers * (visible * scores +
                        selected * (forward + backward + logits + kLoss + 3 * scores)),
          size * (2 * body + layers * (2 * indexer + rows * (kept + index_kept) + selected))};
}

using Numbers = std::vector<double>;

Numbers numbers_of(const Tensor& t) {
  Numbers all;
  for (std::int64_t i = 0; i < t.elements(); ++i) all.push_back(load_double(t.data, t.dtype, i));
  return all;
}

double norm(const Numbers& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

double distance(Numbers x, const Numbers& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] -= y[i];
  return norm(x);
}

class TrainingStepCase : public Case {
 public:
  explicit TrainingStepCase(const Problem& p)
      : mode_(mode_of(p.word("attention"))),
        dtype_(p.dtype()),
        seed_(static_cast<std::uint64_t>(p.number("seed"))),
        rows_(p.number("sequences") * p.number("context")),
        config_(training_step_config(p)),
        losses_(DType::kF64, {1 + config_.layers}) {
    WINNOW_CHECK("problem", rows_ <= kInt32.most, "a step must have at most {} tokens, got {}",
                 kInt32.most, rows_);
    if (ShapesOnly::on()) return;
    check_machine_holds(2 * model::parameter_count(config_) * dtype_bytes(dtype_));
    batch_ = training_step_batch(p, config_);
    model_ = std::make_unique<Transformer>(config_, dtype_, seed_);
    // Matrices that keep the size of what passes through them, so that every part matters.
    for (const auto& parameter : model_->parameters().all()) {
      const Tensor& weight = parameter->value;
      if (weight.rank == 2)
        model::fill_normal(*parameter, 1 / std::sqrt(static_cast<double>(weight.shape[1])), seed_);
    }
  }

  // A step has no list of implementations: each operation inside follows its own. The only verdict
  // says what they choose.
  Explanation explain() const override {
    const char* name = common_name([this](const char* operation) { return choice(operation); });
    return {kName, {{name, detail::refuse_by_user(kName, name)}}};
  }
  bool keeps_own_memory() const override { return true; }  // activations, and scratch of all inside
  // Parameters, tokens, targets and positions; gradients and losses.
  TensorBytes tensor_bytes() const override {
    const std::int64_t size = dtype_bytes(dtype_);
    const std::int64_t parameters =
        model_ != nullptr ? model_->parameters().elements() : model::parameter_count(config_);
    return {parameters * size + rows_ * 3 * dtype_bytes(DType::kI32),
            parameters * size + losses_.view().elements() * dtype_bytes(DType::kF64)};
  }
  std::vector<std::pair<std::string, std::string>> parts() const override {
    std::vector<std::pair<std::string, std::string>> all;
    for (const char* operation : operations_inside(mode_))
      all.emplace_back(operation, choice(operation));
    return all;
  }
  std::int64_t workspace_bytes() const override {
    const Verdict verdict = explain().verdicts.front();
    if (!verdict.refusal.empty()) {
      fail(Status::kUnsupported, kName, "its operations run by {}; {}", verdict.implementation,
           verdict.refusal);
    }
    return 0;
  }
  void run(Workspace) override {
    step(*model_, true, losses_);
    detail::note_run(kName, nullptr, common_name(last_implementation));
  }
  std::vector<Tensor> outputs() const override {
    std::vector<Tensor> all = {losses_};
    for (const auto& p : model_->parameters().all()) all.push_back(p->grad);
    return all;
  }

  // A bound per element would multiply the norms of all layers, and allow anything. This one is for
  // the L2 norm of the error of a gradient, and measures how the step passes errors on: the step is
  // repeated in f64 with every weight moved up or down by one unit roundoff of f32, and r is the
  // root mean square of the distances by which the gradient then moves. An f32 sum of n products is
  // the exact sum for weights moved by at most n + 1 roundings each (gamma(n + 1), backward error);
  // n is the longest sum of the step, over channels, keys or rows. Exponentials, norms and losses
  // add a handful of roundings, far below n. So the bound is (n + 2) r. The moves have random
  // signs, as roundings have none that would know of the loss; several repeats keep a single number
  // from being still by chance.
  //
  // The selection is held as the f32 step made it: a key that roundings exchange is no error, and
  // index_topk has problems of its own. A dot of the indexer so near 0 that ReLU falls differently
  // would show as a miss; the shared problems have none.
  std::vector<Comparison> compare() override {
    std::vector<Numbers> actual = results(*model_, losses_);
    const std::vector<Numbers> truth = exact_step(nullptr);
    std::vector<double> squares(truth.size());
    constexpr int kRepeats = 8;
    for (int repeat = 0; dtype_ == DType::kF32 && repeat < kRepeats; ++repeat) {
      Random random(seed_ + 1000 + static_cast<std::uint64_t>(repeat));
      const std::vector<Numbers> moved = exact_step(&random);
      for (std::size_t i = 0; i < truth.size(); ++i) {
        const double moves = distance(moved[i], truth[i]);
        squares[i] += moves * moves / kRepeats;
      }
    }
    Worst losses("losses"), gradients("gradients");
    const auto count = static_cast<std::size_t>(losses_.view().elements());
    for (std::size_t i = 0; i < truth.size(); ++i) {
      const std::string name =
          i < count ? fmt::format("loss {}", i) : model_->parameters().all()[i - count]->name;
      const double bound = (longest_sum() + 2) * std::sqrt(squares[i]);
      (i < count ? losses : gradients).add(distance(actual[i], truth[i]), 0, bound, [&] {
        return fmt::format("{} of norm {:.3g}, norm of the error", name, norm(truth[i]));
      });
    }
    return {losses.comparison(), gradients.comparison()};
  }

  Cost cost() const override { return step_cost(config_, mode_, batch_.ranges, dtype_); }
  std::int64_t tokens() const override { return rows_; }

 private:
  using Transformer = model::Transformer;

  // The name that all operations inside agree on.
  template <class NameOf>
  const char* common_name(NameOf&& name_of) const {
    const std::vector<const char*> operations = operations_inside(mode_);
    for (const char* name : {"cpu.avx512", "cpu.avx2", "cpu.portable", "reference"}) {
      if (std::all_of(operations.begin(), operations.end(),
                      [&](const char* operation) { return name_of(operation) == name; })) {
        return name;
      }
    }
    return "mixed";
  }
  // Who runs an operation of the step: f32 and contiguous, so only the machine and the user refuse.
  std::string choice(const char* operation) const {
    for (const char* isa : {"avx512", "avx2", "portable"}) {
      std::string name = fmt::format("cpu.{}", isa);
      if (dtype_ == DType::kF32 && refuse_instruction_set(isa).empty() &&
          detail::user_allows(operation, name)) {
        return name;
      }
    }
    return "reference";
  }

  // As a trainer does it: means over the rows.
  void step(Transformer& model, bool backward, const Tensor& losses) const {
    const auto rows = static_cast<double>(batch_.ranges.rows());
    model::StepOptions options;
    options.mode = mode_;
    options.backward = backward;
    options.loss_scale = 1 / rows;
    options.index_loss_scale = mode_ == AttentionMode::kDense ? 0 : 1 / rows;
    model.parameters().zero_grad();
    const model::StepResult result = model.step(batch_, options);
    ref::set(losses, 0, result.nll / rows);
    for (std::int64_t n = 0; n < config_.layers; ++n) {
      const auto layer = static_cast<std::size_t>(n);
      ref::set(losses, 1 + n, result.index_kl.empty() ? 0 : result.index_kl[layer] / rows);
    }
  }

  // The losses, then the gradients.
  static std::vector<Numbers> results(Transformer& model, const Tensor& losses) {
    std::vector<Numbers> all;
    for (const double loss : numbers_of(losses)) all.push_back({loss});
    for (const auto& p : model.parameters().all()) all.push_back(numbers_of(p->grad));
    return all;
  }

  // The step in f64 by the references, with weights moved at random or not at all.
  std::vector<Numbers> exact_step(Random* random) const {
    std::vector<const char*> operations = operations_inside(mode_);
    operations.push_back("index_scores_at");  // of a selection that is held
    std::vector<std::unique_ptr<PinGuard>> pins;
    pins.reserve(operations.size());
    for (const char* operation : operations)
      pins.push_back(std::make_unique<PinGuard>(operation, "reference"));
    Transformer exact(config_, DType::kF64, seed_);
    for (std::size_t n = 0; n < exact.parameters().all().size(); ++n) {
      const Tensor& from = model_->parameters().all()[n]->value;
      double* to = exact.parameters().all()[n]->value.as<double>();
      for (std::int64_t i = 0; i < from.elements(); ++i) {
        to[i] = load_double(from.data, from.dtype, i);
        if (random != nullptr) to[i] *= 1 + (random->below(2) == 0 ? kUnit : -kUnit);
      }
    }
    const Guarded losses(DType::kF64, {1 + config_.layers});
    if (mode_ == AttentionMode::kSparse) {
      // A first step makes room for lists; every list is as long as that of the f32 step.
      step(exact, false, losses);
      const std::vector<Tensor> lists = exact.selections(), held = model_->selections();
      for (std::size_t n = 0; n < lists.size(); ++n) {
        std::copy_n(held[n].as<std::int32_t>(), held[n].elements(), lists[n].as<std::int32_t>());
      }
      exact.freeze_selection(true);
    }
    step(exact, true, losses);
    return results(exact, losses);
  }

  double longest_sum() const {
    std::int64_t longest = batch_.ranges.rows();
    for (const auto& p : model_->parameters().all()) {
      const Tensor& weight = p->value;
      for (int axis = 0; axis < weight.rank; ++axis)
        longest = std::max(longest, weight.shape[static_cast<std::size_t>(axis)]);
    }
    return static_cast<double>(longest);
  }

  AttentionMode mode_;
  DType dtype_;
  std::uint64_t seed_;
  std::int64_t rows_;
  model::ModelConfig config_;
  model::Batch batch_;
  std::unique_ptr<Transformer> model_;
  Guarded losses_;  // f64: nll, then the KL of every layer; means over the rows
};

}  // namespace

model::ModelConfig training_step_config(const Problem& p) {
  model::ModelConfig c;
  c.layers = p.number("layers");  // the rules on all sizes are the model's
  c.intermediate_size = p.number("intermediate");
  c.norm_epsilon = 1e-6;
  attention::AttentionConfig& a = c.attention;
  a.hidden_size = p.number("hidden");
  a.heads = p.number("heads");
  a.q_lora_rank = p.number("q_lora");
  a.kv_lora_rank = p.number("kv_lora");
  a.qk_nope_head_dim = p.number("nope");
  a.qk_rope_head_dim = p.number("rope");
  a.v_head_dim = p.number("v");
  a.latent_norm_epsilon = 1e-6;
  a.rope_theta = 10000;
  a.rope_pairing = nn::RopePairing::kInterleaved;
  a.max_positions = p.number("context");
  a.indexer.index_heads = p.number("index_heads");
  a.indexer.index_dim = p.number("index_dim");
  a.indexer.topk = p.number("topk");
  a.indexer.rope_dim = a.qk_rope_head_dim;
  a.indexer.rope_pairing = nn::RopePairing::kHalfSplit;
  a.indexer.k_norm_epsilon = 1e-6;
  model::validate(c);
  return c;
}

model::Batch training_step_batch(const Problem& p, const model::ModelConfig& config) {
  const std::int64_t sequences = p.number("sequences"), context = p.number("context");
  Random random(static_cast<std::uint64_t>(p.number("seed")) + 100);
  model::Batch batch;
  batch.ranges = batched_ranges(sequences, context);
  for (std::int64_t g = 0; g <= sequences; ++g) batch.cu_seqlens.push_back(g * context);
  for (std::int64_t i = 0; i < batch.ranges.rows(); ++i) {
    batch.tokens.push_back(static_cast<std::int32_t>(random.below(config.vocab_size)));
    batch.targets.push_back(static_cast<std::int32_t>(random.below(config.vocab_size)));
    batch.positions.push_back(static_cast<std::int32_t>(i % context));
  }
  return batch;
}

Operation training_step_operation() {
  const std::string tiny = " layers=2 hidden=20 intermediate=28 v=6 index_heads=3 context=21";
  return {
      kName,
      "forward, losses and backward of a model; the optimiser is not in it",
      {{"attention", "sparse", "what the layers attend to", words({"dense", "warmup", "sparse"})},
       {"layers", "4", "layers"},
       {"hidden", "144", "channels of the residual stream"},
       {"heads", "4", "attention heads"},
       {"intermediate", "384", "channels of the MLP"},
       {"q_lora", "96", "rank of the queries; 0: straight from the hidden state"},
       {"kv_lora", "48", "rank of the keys and values"},
       {"nope", "32", "channels of a head that are not rotated"},
       {"rope", "16", "channels of a head, and of the indexer's, that are"},
       {"v", "32", "channels of a head's value"},
       {"index_heads", "16", "indexer heads"},
       {"index_dim", "32", "channels of an indexer head"},
       {"topk", "128", "keys that the indexer selects"},
       {"sequences", "2", "sequences of the step", kPositive},
       {"context", "1024", "tokens of a sequence", kPositive},
       {"dtype", "f32", "", words({"f64", "f32"})},
       {"seed", "1", "of weights and tokens"}},
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<TrainingStepCase>(p);
      },
      {"training_step attention=sparse heads=3 q_lora=12 kv_lora=10 nope=6 rope=4 index_dim=8 "
       "topk=7" +
           tiny,
       "training_step attention=dense heads=2 q_lora=0 kv_lora=9 nope=5 rope=0 index_dim=7" + tiny,
       "training_step attention=warmup heads=3 q_lora=12 kv_lora=10 nope=6 rope=4 index_dim=8" +
           tiny},
      {"training_step attention=dense", "training_step attention=warmup",
       "training_step attention=sparse"}};
}

}  // namespace winnow::bench
