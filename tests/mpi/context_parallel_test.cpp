// Context parallelism over MPI: every group that the processes can form gives the selections, the
// forward's bits, the losses and the gradients of one process, and the same bits as ranks that are
// threads.
#include <gtest/gtest.h>

#include "tests/context_cases.h"
#include "tests/mpi/world.h"
#include "tests/thread_ranks.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

struct Case {
  std::string name;
  ModelConfig config;
  AttentionMode mode = AttentionMode::kSparse;
  Recompute recompute;
};

std::vector<Case> cases() {
  ModelConfig mxfp8 = tiny_model(tiny_mla());
  mxfp8.attention.indexer.index_dim = 32;
  mxfp8.attention.indexer.precision = attention::SelectionPrecision::kMxfp8;
  Recompute full, reuse;
  full.full = reuse.full = reuse.reuse_checkpoint_topk = true;
  const auto both = mtp_models()[4].second, gqa = tiny_models()[3].second;
  return {{"mtp", both, AttentionMode::kSparse, {}},
          {"mtp_replayed", both, AttentionMode::kSparse, full},
          {"mtp_reused", both, AttentionMode::kSparse, reuse},
          {"mtp_warmup", both, AttentionMode::kWarmup, {}},
          {"gqa", gqa, AttentionMode::kSparse, {}},
          {"gqa_dense", gqa, AttentionMode::kDense, {}},
          {"shared", tiny_models()[2].second, AttentionMode::kSparse, full},
          {"mxfp8", mxfp8, AttentionMode::kSparse, {}},
          {"pools", pool_models()[0].second, AttentionMode::kSparse, full}};
}

TEST(MpiContextParallel, F14F17EveryGroupGivesWhatOneProcessGives) {
  const testing::ThreadsGuard one_thread(1);
  for (const Case& c : cases()) {
    const Batch batch = packed_batch({14, 0, 3, 21}, c.config.vocab_size, 5);
    StepOptions options = context_options(c.config, c.mode);
    options.recompute = c.recompute;
    const ContextOutcome alone = run_alone(c.config, DType::kF32, batch, options);
    for (std::int64_t size = 2; size <= world().size(); size *= 2) {
      SCOPED_TRACE(fmt::format("{} on {} ranks", c.name, size));
      const std::unique_ptr<Communicator> group =
          world().split(world().rank() / size, world().rank());
      Transformer model = shaken_model(c.config);
      const ContextOutcome o = run_shared(model, batch, options, *group);
      expect_same(o, alone, DType::kF32);
      const ContextOutcome again = run_shared(model, batch, options, *group);
      EXPECT_EQ(again.gradients, o.gradients);
      if (world().rank() > 0) continue;
      testing::run_ranks(size, [&](testing::ThreadCommunicator& threads) {
        Transformer same = shaken_model(c.config);
        const ContextOutcome as_threads = run_shared(same, batch, options, threads);
        EXPECT_EQ(as_threads.gradients, o.gradients);
        EXPECT_EQ(as_threads.result.nll, o.result.nll);
      });
    }
  }
}

}  // namespace
}  // namespace winnow::model
