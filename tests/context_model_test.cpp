// Context parallelism of whole models, on ranks that are threads: the same selections and forward
// bits as on one rank, the same losses and gradients, for every model, mode and number of ranks.
#include <gtest/gtest.h>

#include "tests/context_cases.h"
#include "tests/gradient.h"
#include "tests/thread_ranks.h"
#include "winnow/validation.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;
using testing::error_of;
using testing::run_ranks;
using testing::ThreadCommunicator;

std::vector<std::pair<std::string, ModelConfig>> models() {
  std::vector<std::pair<std::string, ModelConfig>> all = tiny_models();
  for (const auto& model : mtp_models()) all.push_back(model);
  ModelConfig deep = tiny_model(tiny_gqa());
  deep.layers = 4;
  deep.sharing = {3, 2};  // layers 1, 2 and 5 compute
  all.emplace_back("gqa_shared", deep);
  return all;
}

ModelConfig mxfp8_model() {
  ModelConfig c = tiny_model(tiny_mla());
  c.attention.indexer.index_dim = 32;
  c.attention.indexer.precision = attention::SelectionPrecision::kMxfp8;
  return c;
}

ContextOutcome run_on(std::int64_t ranks, const ModelConfig& config, DType dtype,
                      const Batch& batch, const StepOptions& options, std::int64_t local_rows = 0) {
  ContextOutcome outcome;
  run_ranks(ranks, [&](ThreadCommunicator& group) {
    Transformer model = shaken_model(config, dtype);
    const ContextOutcome o = run_shared(model, batch, options, group, local_rows);
    if (group.rank() == 0) outcome = o;
  });
  return outcome;
}

void expect_same_on_all(const std::string& name, const ModelConfig& config, DType dtype,
                        const Batch& batch, const StepOptions& options) {
  const ContextOutcome alone = run_alone(config, dtype, batch, options);
  for (const std::int64_t ranks : {1, 2, 4, 8}) {
    SCOPED_TRACE(fmt::format("{} {} on {} ranks", name, dtype_name(dtype), ranks));
    if (ranks == 1) {  // not a bit differs
      run_ranks(1, [&](ThreadCommunicator& group) {
        Transformer model = shaken_model(config, dtype);
        const Batch mine = share_batch(batch, group);
        EXPECT_EQ(mine.context, nullptr);
        model.step(mine, options);
        EXPECT_EQ(gradients_of(model), alone.gradients);
        EXPECT_EQ(group.exchanges, 0);
      });
      continue;
    }
    expect_same(run_on(ranks, config, dtype, batch, options), alone, dtype);
  }
}

// F14, F17: sequences of any length, an empty one and one shorter than there are ranks among them.
TEST(ContextParallel, F14F17SelectionsBitsAndGradientsAreThoseOfOneRank) {
  for (const auto& [name, config] : models()) {
    const Batch batch = packed_batch({14, 0, 3, 21}, config.vocab_size, 5);
    for (const AttentionMode mode :
         {AttentionMode::kDense, AttentionMode::kWarmup, AttentionMode::kSparse}) {
      const StepOptions options = context_options(config, mode);
      for (const DType dtype : {DType::kF64, DType::kF32}) {
        expect_same_on_all(name, config, dtype, batch, options);
      }
    }
  }
}

// Pools of keys and gates of all ranks: with tail and without, shared, quantised, replayed, of
// depths; sequences shorter than a pool among them.
TEST(ContextParallel, SelectsPoolsAsOneRankDoes) {
  std::vector<std::pair<std::string, ModelConfig>> all = pool_models();
  ModelConfig depths = all[0].second;
  depths.mtp_depths = 3;
  depths.mtp_shared_components = {true, true};
  all.emplace_back("pools_depths", depths);
  for (const auto& [name, config] : all) {
    const Batch batch = packed_batch({14, 0, 3, 21, 1}, config.vocab_size, 5);
    StepOptions options = context_options(config, AttentionMode::kSparse);
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      expect_same_on_all(name, config, dtype, batch, options);
    }
    options.recompute.full = true;
    expect_same_on_all(name + " replayed", config, DType::kF64, batch, options);
  }
  ModelConfig e4m3 = all[1].second;
  e4m3.attention.indexer.precision = attention::SelectionPrecision::kE4m3;
  const Batch batch = packed_batch({30, 17}, e4m3.vocab_size, 6);
  expect_same_on_all("e4m3", e4m3, DType::kF32, batch,
                     context_options(e4m3, AttentionMode::kSparse));
}

// A window, whose pools begin where the batch says, on every rank.
TEST(ContextParallel, PoolsBeginWhereTheBatchSays) {
  const ModelConfig config = pool_models()[1].second;
  Batch batch = packed_batch({9, 26}, config.vocab_size, 5);
  for (std::size_t i = 9; i < 35; ++i) {
    batch.ranges.starts[i] = std::max(9, static_cast<std::int32_t>(i) - 11);
  }
  const StepOptions options = context_options(config, AttentionMode::kSparse);
  const std::string refusal = error_of([&] {
    run_ranks(4, [&](ThreadCommunicator& group) {
      Transformer model = shaken_model(config);
      model.step(share_batch(batch, group), options);
    });
  });
  EXPECT_NE(refusal.find("Batch::spans"), std::string::npos) << refusal;
  batch.spans = packed_spans(std::vector<std::int32_t>{0, 9, 35});
  expect_same_on_all("window", config, DType::kF64, batch, options);
}

TEST(ContextParallel, SelectsInMxfp8AsOneRankDoes) {
  const ModelConfig config = mxfp8_model();
  const Batch batch = packed_batch({30, 17}, config.vocab_size, 6);
  for (const double index_scale : {1.3, 0.0}) {  // learning, and frozen
    StepOptions options = context_options(config, AttentionMode::kSparse);
    options.index_loss_scale = index_scale;
    expect_same_on_all("mxfp8", config, DType::kF32, batch, options);
  }
}

// The bits of a run depend on the number of ranks alone.
TEST(ContextParallel, IsBitForBitRepeatable) {
  const ModelConfig config = mtp_models()[4].second;
  const Batch batch = packed_batch({14, 9}, config.vocab_size, 5);
  const StepOptions options = context_options(config, AttentionMode::kSparse);
  const ContextOutcome once = run_on(4, config, DType::kF32, batch, options);
  const ContextOutcome again = run_on(4, config, DType::kF32, batch, options);
  EXPECT_EQ(again.gradients, once.gradients);
  EXPECT_EQ(again.result.nll, once.result.nll);
  EXPECT_EQ(again.result.index_kl, once.result.index_kl);
}

std::vector<std::pair<std::string, Recompute>> recomputes() {
  //                  full  core   norms  mlp    query  reuse
  return {{"full", {true, false, false, false, false, false}},
          {"full_reuse", {true, false, false, false, false, true}},
          {"core", {false, true, false, false, false, false}},
          {"core_reuse", {false, true, false, false, false, true}},
          {"parts", {false, true, true, true, true, false}}};
}

// Replays exchange keys again, and change no bit; with the selection kept no rank scores again.
TEST(ContextParallel, RecomputeChangesNoBit) {
  for (const auto& [name, config] :
       {tiny_models()[0], tiny_models()[3], mtp_models()[1], mtp_models()[4]}) {
    const Batch batch = packed_batch({14, 9}, config.vocab_size, 5);
    const StepOptions kept = context_options(config, AttentionMode::kSparse);
    run_ranks(4, [&, config = config, name = name](ThreadCommunicator& group) {
      Transformer model = shaken_model(config);
      const ContextOutcome o = run_shared(model, batch, kept, group);
      for (const auto& [choice, recompute] : recomputes()) {
        if (recompute.core_attention && config.mtp_shared_components.latent_kv) continue;
        StepOptions options = kept;
        options.recompute = recompute;
        const ContextOutcome again = run_shared(model, batch, options, group);
        EXPECT_EQ(again.gradients, o.gradients) << name << " " << choice;
        EXPECT_EQ(again.result.nll, o.result.nll) << name << " " << choice;
        if (recompute.reuse_checkpoint_topk) {
          EXPECT_EQ(again.result.index_runs.replay, 0) << name << " " << choice;
        }
      }
    });
  }
}

// How often the ranks exchange rows in a step, beside the one look at each other's geometry: of
// what is gathered, and of whose gradient is scattered, once each.
std::int64_t exchanges(const ModelConfig& config, const Recompute& recompute) {
  std::int64_t count = 0;
  const bool validates = validation();
  set_validation(false);  // it exchanges, too
  run_ranks(2, [&](ThreadCommunicator& group) {
    Transformer model = shaken_model(config);
    const Batch mine = share_batch(packed_batch({14, 9}, config.vocab_size, 5), group);
    StepOptions options = context_options(config, AttentionMode::kSparse);
    options.measure_selection = false;
    options.recompute = recompute;
    model.step(mine, options);
    if (group.rank() == 0) count = group.exchanges - 1;
  });
  set_validation(validates);
  return count;
}

TEST(ContextParallel, ExchangesWhatIsReadAndNothingTwice) {
  ModelConfig mla = tiny_model(tiny_mla()), gqa = tiny_model(tiny_gqa());
  // Two layers: latent and index keys, and back.
  EXPECT_EQ(exchanges(mla, {}), 2 * 4);
  EXPECT_EQ(exchanges(gqa, {}), 2 * 6);
  ModelConfig shared = mla;  // layer 2 has no indexer
  shared.sharing.topk_freq = 2;
  EXPECT_EQ(exchanges(shared, {}), 4 + 2);
  // Three depths: each its own keys; or those of the first, in one gather and one scatter.
  ModelConfig mtp = mla;
  mtp.mtp_depths = 3;
  EXPECT_EQ(exchanges(mtp, {}), 5 * 4);
  mtp.mtp_shared_components.sparse_attention_index = true;
  EXPECT_EQ(exchanges(mtp, {}), 3 * 4 + 2 * 2);
  mtp.mtp_shared_components.latent_kv = true;
  EXPECT_EQ(exchanges(mtp, {}), 3 * 4);
  // A replay gathers what it makes again: all keys; those it selects from; none.
  EXPECT_EQ(exchanges(mla, {true, false, false, false, false, false}), 2 * (4 + 2));
  EXPECT_EQ(exchanges(mla, {true, false, false, false, false, true}), 2 * (4 + 1));
  EXPECT_EQ(exchanges(mla, {false, true, false, false, false, false}), 2 * (4 + 1));
  EXPECT_EQ(exchanges(mla, {false, true, false, false, false, true}), 2 * 4);
  EXPECT_EQ(exchanges(mla, {false, false, true, true, true, false}), 2 * 4);
  // Pools: the keys, index keys and gates; nothing of the indexer comes back.
  EXPECT_EQ(exchanges(pool_models()[0].second, {}), 2 * (1 + 2 + 1));
  // MXFP8 selects from codes and scales, and learns from what was not quantised.
  EXPECT_EQ(exchanges(mxfp8_model(), {}), 2 * 6);
}

// Finite differences of the whole group's loss, on two ranks that move in step: each element of
// every tensor's first few, as in model_gradient_test.cpp, whose bound this is.
TEST(ContextParallel, GradientsMatchFiniteDifferences) {
  for (const auto& [name, config] : {mtp_models()[4], tiny_models()[3]}) {
    for (const AttentionMode mode : {AttentionMode::kSparse, AttentionMode::kWarmup}) {
      run_ranks(2, [&, config = config, name = name](ThreadCommunicator& group) {
        Transformer model = shaken_model(config, DType::kF64);
        const Batch mine = share_batch(packed_batch({9, 6}, config.vocab_size, 5), group);
        StepOptions options = context_options(config, mode);
        options.measure_selection = false;
        if (mode == AttentionMode::kSparse) {
          model.step(mine, options);
          model.freeze_selection(true);
        }
        model.parameters().zero_grad();
        model.step(mine, options);
        sum_gradients(group, model);
        options.backward = false;
        const auto losses = [&](bool of_indexers) {
          StepResult r = model.step(mine, options);
          sum_result(group, r);
          double language = options.loss_scale * r.nll, index = 0;
          for (std::size_t d = 0; d < r.mtp_nll.size(); ++d) {
            language += options.mtp_loss_scales[d] * r.mtp_nll[d];
          }
          for (const double kl : r.index_kl) index += options.index_loss_scale * kl;
          return of_indexers ? index : language;
        };
        constexpr double kStep = 1e-4;
        for (const auto& p : model.parameters().all()) {
          const std::int64_t size = p->value.elements(), samples = std::min<std::int64_t>(size, 2);
          for (std::int64_t s = 0; s < samples; ++s) {
            const std::int64_t i = (2 * s + 1) * size / (2 * samples);
            double& x = p->value.as<double>()[i];
            const double held = x;
            const auto value = [&](double offset) {
              x = held + offset;
              const double loss = losses(p->indexer);
              x = held;
              return loss;
            };
            const double near = (value(kStep) - value(-kStep)) / (2 * kStep);
            const double far = (value(2 * kStep) - value(-2 * kStep)) / (4 * kStep);
            const bool trained = p->indexer || mode != AttentionMode::kWarmup;
            const double expected = trained ? (4 * near - far) / 3 : 0;
            EXPECT_NEAR(p->grad.as<double>()[i], expected, 1e-6 * std::abs(expected) + 1e-8)
                << name << " " << p->name << " element " << i;
          }
        }
      });
    }
  }
}

// Another group for every micro-batch: one over four ranks, then one for each pair of them, all in
// flight at once. Replays and backward exchange with the group of their forward.
TEST(ContextParallel, TheGroupMayDifferByMicroBatch) {
  const ModelConfig config = mtp_models()[4].second;
  const Batch batches[] = {packed_batch({14, 9}, 11, 5), packed_batch({21}, 11, 6),
                           packed_batch({3, 17}, 11, 7)};
  for (const bool full : {false, true}) {
    StepOptions options = context_options(config, AttentionMode::kSparse);
    options.recompute.full = full;
    Transformer alone = shaken_model(config, DType::kF64);
    for (const Batch& batch : batches) alone.step(batch, options);
    ContextOutcome expected, actual;
    expected.gradients = gradients_of(alone);
    run_ranks(4, [&](ThreadCommunicator& world) {
      const std::unique_ptr<Communicator> pair = world.split(world.rank() / 2, world.rank());
      Transformer model = shaken_model(config, DType::kF64);
      Batch of_all = share_batch(batches[0], world),
            of_pair = share_batch(batches[1 + world.rank() / 2], *pair);
      Pass first, second;
      model.forward(of_all, options, first);
      model.forward(of_pair, options, second);
      // Whatever the batch says by now: a pass remembers.
      of_all.context = of_pair.context;
      of_pair.context = nullptr;
      model.backward(first);
      model.backward(second);
      sum_gradients(world, model);
      if (world.rank() == 0) actual.gradients = gradients_of(model);
    });
    expect_same(actual, expected, DType::kF64);
  }
}

// Rows of padding, at the ends of sequences and of buffers, and ranks that own nothing else.
TEST(ContextParallel, D7D13F7PaddingAndEmptySequencesChangeNothing) {
  const ModelConfig config = tiny_model(tiny_mla());
  const StepOptions options = context_options(config, AttentionMode::kSparse);
  for (const std::vector<std::int32_t>& lengths :
       {std::vector<std::int32_t>{5, 7}, {16, 0, 16}, {3, 20}, {1}, {2, 2, 2}}) {
    const Batch batch = packed_batch(lengths, 11, 8);
    const ContextOutcome alone = run_alone(config, DType::kF64, batch, options);
    for (const std::int64_t ranks : {4, 8}) {
      for (const std::int64_t more : {0, 3}) {
        const std::int64_t rows = more == 0 ? 0 : 9 + more;
        SCOPED_TRACE(fmt::format("{} sequences, {} ranks, {} rows", lengths.size(), ranks, rows));
        expect_same(run_on(ranks, config, DType::kF64, batch, options, rows), alone, DType::kF64);
      }
    }
  }
}

// A batch of nothing is no work, and no error.
TEST(ContextParallel, EmptySequencesAloneAreNoLoss) {
  const ModelConfig config = tiny_model(tiny_gqa());
  run_ranks(2, [&](ThreadCommunicator& group) {
    Transformer model = shaken_model(config);
    const ContextOutcome o = run_shared(model, packed_batch({0, 0}, 11, 8),
                                        context_options(config, AttentionMode::kSparse), group);
    EXPECT_EQ(o.result.nll, 0);
    EXPECT_EQ(o.result.tokens, 0);
    for (const std::vector<double>& gradient : o.gradients) {
      for (const double g : gradient) EXPECT_EQ(g, 0);
    }
  });
}

TEST(ContextParallel, RanksThatHoldDifferentBatchesAreAnError) {
  run_ranks(2, [](ThreadCommunicator& group) {
    const ModelConfig config = tiny_model(tiny_mla());
    Transformer model = shaken_model(config);
    StepOptions options;
    const auto error = [&](const Batch& batch, std::int64_t rows) {
      return error_of([&] { model.step(share_batch(batch, group, rows), options); });
    };
    const std::int64_t rank = group.rank();
    EXPECT_NE(error(packed_batch({8, 8}, 11, 1), 8 + rank)
                  .find("every rank must hold as many rows, padding included, got 8, 9"),
              std::string::npos);
    EXPECT_NE(error(packed_batch({8 + 4 * static_cast<int>(rank)}, 11, 1), 8)
                  .find("parts of the same sequences"),
              std::string::npos);
  });
}

// Tables are the pass's until its backward.
TEST(ContextParallel, RefreshedTablesWaitForTheBackward) {
  run_ranks(2, [](ThreadCommunicator& group) {
    const ModelConfig config = tiny_model(tiny_mla());
    Transformer model = shaken_model(config);
    const auto context = std::make_shared<attention::ContextGroup>(
        group, ContextTables(std::vector<std::int64_t>{0, 8, 16}, 2, group.rank(), 8));
    StepOptions options;
    Pass pass;
    const Batch first = cut_batch(packed_batch({8, 8}, 11, 1), context);
    model.forward(first, options, pass);
    context->refresh(std::vector<std::int64_t>{0, 4, 16});
    EXPECT_NE(error_of([&] { model.backward(pass); }).find("refreshed before its backward"),
              std::string::npos);
    // The next micro-batch of equal geometry has what it would have from tables of its own.
    const Batch next = packed_batch({4, 12}, 11, 2);
    const Batch refreshed = cut_batch(next, context), fresh = share_batch(next, group);
    EXPECT_EQ(refreshed.tokens, fresh.tokens);
    model.parameters().zero_grad();
    model.step(refreshed, options);
    const auto gradients = gradients_of(model);
    model.parameters().zero_grad();
    model.step(fresh, options);
    EXPECT_EQ(gradients_of(model), gradients);
  });
}

// All ranks together do what one does, but for rows of padding.
TEST(ContextParallel, FourRanksDoTheArithmeticOfOne) {
  for (const auto& [name, config] : {tiny_models()[0], tiny_models()[3], mtp_models()[4]}) {
    ModelConfig longer = config;
    longer.attention.max_positions = 512;
    longer.attention.indexer.topk = 32;
    for (const AttentionMode mode : {AttentionMode::kSparse, AttentionMode::kWarmup}) {
      StepOptions options = context_options(longer, mode);
      options.measure_selection = false;
      const auto flops = [&](const Batch& batch, std::int64_t ranks) {
        std::vector<double> all(1);
        run_ranks(ranks, [&](ThreadCommunicator& group) {
          Transformer model = shaken_model(longer);
          std::vector<double> mine = {model.step(share_batch(batch, group), options).flops};
          sum_over(group, mine);
          if (group.rank() == 0) all = mine;
        });
        return all[0];
      };
      const Batch whole = packed_batch({256, 128}, 11, 3), odd = packed_batch({201, 77, 41}, 11, 3);
      EXPECT_EQ(flops(whole, 4), flops(whole, 1)) << name;
      EXPECT_GT(flops(whole, 1), 1e6) << name;
      EXPECT_GT(flops(odd, 4), flops(odd, 1)) << name;
      EXPECT_LE(flops(odd, 4), 1.15 * flops(odd, 1)) << name;
    }
  }
}

}  // namespace
}  // namespace winnow::model
