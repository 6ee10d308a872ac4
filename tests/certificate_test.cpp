// The certificate of the layer: its backward tells sparse_attention_backward that every row attends
// to a key exactly where that is so, and the word changes no bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/attention_call.h"
#include "tests/layer_trial.h"
#include "winnow/validation.h"

namespace winnow::attention {
namespace {

constexpr std::int64_t kMost = 12;  // rows

// One layer with its inputs; what it computes stays in the fields.
struct Trial : LayerTrial {
  Array output, d_output, d_x;

  explicit Trial(const AttentionConfig& c) : LayerTrial(c, kMost, DType::kF32) {}
  // Forward and backward; returns the certificate.
  bool run(AttentionMode mode, bool hold = false) {
    const std::int64_t n = ranges.rows();
    positions.assign(static_cast<std::size_t>(n), 0);
    const Tensor in = x.value.view().rows(0, n);
    output = Array(DType::kF32, {n, config.hidden_size});
    d_output = Array(DType::kF32, {n, config.hidden_size});
    d_x = Array(DType::kF32, {n, config.hidden_size});
    for (std::int64_t i = 0; i < d_output.elements(); ++i)
      d_output.as<float>()[i] = static_cast<float>(i % 7) - 3;
    for (const auto& p : parameters.all()) p->grad.zero();
    activations.cache.fit(config, DType::kF32, n);
    LayerOptions options;
    options.mode = mode;
    options.hold_selection = hold;
    layer.forward(in, rows_of(positions, ranges), options, activations.kept(), memory, output);
    layer.backward(in, rows_of(positions, ranges), options, activations.kept(), d_output, d_x, {},
                   memory);
    return activations.core.selected.rows_nonempty;
  }
};

struct ValidationGuard {
  ValidationGuard() { set_validation(true); }
  ~ValidationGuard() { set_validation(false); }
};

constexpr AttentionMode kModes[] = {AttentionMode::kSparse, AttentionMode::kDense};

// A row of padding takes the certificate away, and nothing else: the other rows' gradients and the
// parameters' keep their bits. Validation mode checks the word itself.
TEST(Certificate, WithItAndWithoutEveryBitIsTheSame) {
  const ValidationGuard validate;
  for (const AttentionConfig& config : {model::tiny_mla(), model::tiny_gqa()}) {
    for (const AttentionMode mode : kModes) {
      Trial with(config), without(config);
      with.ranges = packed_ranges(std::vector<std::int32_t>{0, 7, 11}, 11);
      without.ranges = packed_ranges(std::vector<std::int32_t>{0, 7, 11}, 12);
      EXPECT_TRUE(with.run(mode));
      EXPECT_FALSE(without.run(mode));
      const std::size_t bytes = static_cast<std::size_t>(with.d_x.bytes());
      EXPECT_EQ(std::memcmp(with.d_x.as<void>(), without.d_x.as<void>(), bytes), 0);
      for (std::size_t p = 0; p < with.parameters.all().size(); ++p) {
        const Parameter& a = *with.parameters.all()[p];
        EXPECT_TRUE(same_bits(a.grad, without.parameters.all()[p]->grad)) << a.name;
      }
    }
  }
}

TEST(Certificate, ARowOfPaddingNeverGetsIt) {
  const ValidationGuard validate;
  for (const AttentionMode mode : kModes) {
    for (const std::size_t padding : {0, 4, 8}) {
      Trial trial(model::tiny_mla());
      trial.ranges = causal_ranges(9);
      EXPECT_TRUE(trial.run(mode));
      trial.ranges.ends[padding] = trial.ranges.starts[padding];
      EXPECT_FALSE(trial.run(mode)) << padding;
      const float* d_x = trial.d_x.as<float>();
      for (std::int64_t i = 0; i < trial.d_x.elements(); ++i) EXPECT_TRUE(std::isfinite(d_x[i]));
    }
  }
}

// The ranges would prove it; the scores select nothing.
TEST(Certificate, ScoresThatAreNanGiveNone) {
  const ValidationGuard validate;
  Trial trial(model::tiny_mla());
  trial.ranges = causal_ranges(9);
  model::fill_constant(*trial.parameters.find("indexer.weights_proj.weight"),
                       std::numeric_limits<double>::quiet_NaN());
  EXPECT_FALSE(trial.run(AttentionMode::kSparse));
  EXPECT_TRUE(trial.run(AttentionMode::kDense));
}

// A selection of one pass, kept for ranges in which a row finds none of its keys.
TEST(Certificate, AReusedSelectionIsReadAgain) {
  Trial trial(model::tiny_mla());
  trial.ranges = causal_ranges(9);
  EXPECT_TRUE(trial.run(AttentionMode::kSparse));
  EXPECT_TRUE(trial.run(AttentionMode::kSparse, true));
  trial.ranges.starts[2] = 3;  // row 2 chose among the keys 0, 1 and 2
  trial.ranges.ends[2] = 9;
  EXPECT_FALSE(trial.run(AttentionMode::kSparse, true));
}

}  // namespace
}  // namespace winnow::attention
