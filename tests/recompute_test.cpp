// Recomputation: every bit of losses and gradients is that of the step that keeps everything, for
// every model, mode and choice; who runs again is counted, and memory is really given up.
#include <gtest/gtest.h>
#include <malloc.h>

#include "tests/tiny_models.h"
#include "winnow/error.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

struct Choice {
  std::string name;
  Recompute recompute;
};

std::vector<Choice> choices() {
  //       full  core   norms  mlp    query  reuse
  return {{"full", {true, false, false, false, false, false}},
          {"full_reuse", {true, false, false, false, false, true}},
          {"core", {false, true, false, false, false, false}},
          {"core_reuse", {false, true, false, false, false, true}},
          {"norms", {false, false, true, false, false, false}},
          {"mlp", {false, false, false, true, false, false}},
          {"query", {false, false, false, false, true, false}},
          {"parts", {false, true, true, true, true, false}},
          {"parts_reuse", {false, true, true, true, true, true}},
          {"all_but_core", {false, false, true, true, true, false}}};
}

std::vector<std::pair<std::string, ModelConfig>> models() {
  std::vector<std::pair<std::string, ModelConfig>> all = tiny_models();
  for (const auto& model : mtp_models()) all.push_back(model);
  return all;
}

struct Outcome {
  StepResult result;
  std::vector<std::vector<double>> numbers;  // losses, then gradients
};

Outcome run(const ModelConfig& config, AttentionMode mode, double index_scale,
            const Recompute& recompute) {
  Transformer model = shaken_model(config);
  StepOptions options;
  options.mode = mode;
  options.index_loss_scale = index_scale;
  options.mtp_loss_scales.assign(static_cast<std::size_t>(config.mtp_depths), 0.4);
  options.recompute = recompute;
  Outcome o;
  // Two steps, the first on other data: what it leaves in buffers must not be read.
  model.step(packed_batch({5, 22}, config.vocab_size, 9), options);
  model.parameters().zero_grad();
  o.result = model.step(packed_batch({14, 9}, config.vocab_size, 5), options);
  o.numbers = {{o.result.nll}, o.result.index_kl, o.result.mtp_nll};
  for (const auto& p : model.parameters().all()) o.numbers.push_back(numbers(p->grad));
  return o;
}

bool refused(const ModelConfig& config, const Recompute& recompute) {
  return recompute.core_attention && config.mtp_shared_components.latent_kv;
}

// Calls whose selection nobody else needs, of a model: what a replay must select again.
std::int64_t calls_of_their_own(const ModelConfig& c) {
  std::int64_t calls = 0;
  for (std::int64_t n = 1; n <= c.layers; ++n) {
    const bool last = n == c.layers + (c.mtp_depths > 0 ? 1 : 0);
    const bool consumed = !last && !computes_indices(c.sharing, n + 1);
    calls += computes_indices(c.sharing, n) && !consumed ? 1 : 0;
  }
  const bool computes = c.mtp_depths > 0 && computes_indices(c.sharing, c.layers + 1);
  return calls + (computes && !c.mtp_shared_components.sparse_attention_index ? c.mtp_depths : 0);
}

TEST(Recompute, GradientsHaveTheSameBits) {
  for (const auto& [name, config] : models()) {
    for (const AttentionMode mode : {AttentionMode::kDense, AttentionMode::kSparse}) {
      const bool sparse = mode == AttentionMode::kSparse;
      for (const double index_scale :
           sparse ? std::vector<double>{1.3, 0} : std::vector<double>{0}) {
        const Outcome kept = run(config, mode, index_scale, {});
        EXPECT_EQ(kept.result.index_runs.replay, 0);
        for (const Choice& choice : choices()) {
          if (refused(config, choice.recompute)) continue;
          const Outcome again = run(config, mode, index_scale, choice.recompute);
          EXPECT_EQ(again.numbers, kept.numbers) << name << " " << choice.name;
          EXPECT_EQ(again.result.index_runs.forward, kept.result.index_runs.forward);
          const bool selects = sparse && choice.recompute.replays_selection() &&
                               !choice.recompute.reuse_checkpoint_topk;
          EXPECT_EQ(again.result.index_runs.replay, selects ? calls_of_their_own(config) : 0)
              << name << " " << choice.name;
        }
      }
    }
  }
}

// E8: with the selections of replays kept, two micro-batches in flight replay each its own.
TEST(Recompute, E8ReplaysAttendToTheSelectionOfTheirOwnForward) {
  for (const bool reuse : {false, true}) {
    Transformer model = shaken_model(tiny_model(tiny_mla()));
    StepOptions options;
    options.mode = AttentionMode::kSparse;
    options.index_loss_scale = 1;
    const Batch a = packed_batch({14, 9}, 11, 5), b = packed_batch({5, 22}, 11, 9);
    model.step(a, options);
    const auto of_a = take_layer_gradients(model);
    model.step(b, options);
    const auto of_b = take_layer_gradients(model);
    options.recompute.full = true;
    options.recompute.reuse_checkpoint_topk = reuse;
    Pass first, second;
    model.forward(a, options, first);
    model.forward(b, options, second);
    take_layer_gradients(model);
    EXPECT_EQ(model.backward(second).replay, reuse ? 0 : 2);
    EXPECT_EQ(take_layer_gradients(model), of_b);
    EXPECT_EQ(model.backward(first).replay, reuse ? 0 : 2);
    EXPECT_EQ(take_layer_gradients(model), of_a);
    EXPECT_EQ(first.selections()[0].empty(), !reuse);
  }
}

// What a pass holds between forward and backward, in bytes of the process. Each choice holds less
// than keeping everything by what it names, per layer and row.
TEST(Recompute, MemoryIsGivenUp) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's allocator does not count";
#endif
  ModelConfig config = tiny_model(tiny_mla());
  config.layers = 3;
  config.intermediate_size = 96;
  const attention::AttentionConfig& c = config.attention;
  const std::int64_t rows = 6000, hidden = c.hidden_size;
  const auto held = [&](const Recompute& recompute) {
    Transformer model(config, DType::kF32, 3);
    StepOptions options;
    options.mode = AttentionMode::kSparse;
    options.recompute = recompute;
    Batch large;
    for (std::int64_t i = 0; i < rows; ++i) {
      large.tokens.push_back(static_cast<std::int32_t>(i % 11));
      large.targets.push_back(static_cast<std::int32_t>(i % 7));
      large.positions.push_back(static_cast<std::int32_t>(i % 50));
    }
    large.ranges = batched_ranges(120, 50);
    model.step(large, options);  // what does not belong to a pass has grown
    const auto bytes = [] {
      const struct mallinfo2 info = mallinfo2();
      return static_cast<double>(info.uordblks + info.hblkhd);
    };
    Pass pass;
    const double before = bytes();
    model.forward(large, options, pass);
    return (bytes() - before) / static_cast<double>(rows * config.layers * 4);  // floats
  };
  const double all = held({});
  const auto saved = [&](const Recompute& recompute) { return all - held(recompute); };
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double dims = number(c.qk_nope_head_dim + c.qk_rope_head_dim),
               latent = number(c.kv_lora_rank + c.qk_rope_head_dim), heads = number(c.heads);
  // Numbers of a row and layer; what does not grow with rows is far below one.
  const double norms = 2 * number(hidden) + 2, mlp = 3 * 96, query = heads * (dims + latent),
               core = heads * number(c.kv_lora_rank + c.v_head_dim + 1),
               selection = number(c.indexer.topk) + 1;
  constexpr double kRounding = 1;
  EXPECT_NEAR(saved({false, false, true, false, false, false}), norms, kRounding);
  EXPECT_NEAR(saved({false, false, false, true, false, false}), mlp, kRounding);
  EXPECT_NEAR(saved({false, false, false, false, true, false}), query, kRounding);
  EXPECT_NEAR(saved({false, true, false, false, false, false}), core + selection, kRounding);
  EXPECT_NEAR(saved({false, true, false, false, false, true}), core, kRounding);
  // In full only the input of each block is left; and the end of the stream with its norm, and the
  // gradient of that, which belong to no layer.
  const double ends = (3 * number(hidden) + 1) / number(config.layers);
  EXPECT_NEAR(held({true, false, false, false, false, false}), number(hidden) + ends, kRounding);
  EXPECT_NEAR(held({true, false, false, false, false, true}), number(hidden) + ends + selection,
              kRounding);
}

TEST(Recompute, UnsupportedCombinationsAreNamed) {
  ModelConfig plain = tiny_model(tiny_mla()), shared = mtp_models()[3].second;
  const auto refusal = [](const Recompute& recompute, const ModelConfig& config) -> std::string {
    try {
      validate(recompute, config);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  for (const Choice& choice : choices()) EXPECT_EQ(refusal(choice.recompute, plain), "");
  EXPECT_NE(refusal({true, false, true, false, false, false}, plain).find("name it alone"),
            std::string::npos);
  EXPECT_NE(refusal({false, true, false, false, false, false}, shared).find("\"latent_kv\""),
            std::string::npos);
  EXPECT_EQ(refusal({true, false, false, false, false, true}, shared), "");
  for (const Recompute& nothing_selects : {Recompute{false, false, false, false, false, true},
                                           Recompute{false, false, true, true, true, true}}) {
    EXPECT_NE(refusal(nothing_selects, plain).find("reuse_checkpoint_topk"), std::string::npos);
  }
  Transformer model(shared, DType::kF32, 1);
  StepOptions options;
  options.recompute.core_attention = true;
  EXPECT_THROW(model.step(packed_batch({5}, 11, 5), options), Error);
}

}  // namespace
}  // namespace winnow::model
