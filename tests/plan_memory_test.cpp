// Memory of a planned step: numbers of parameters, micro-batches in flight, score chunks, and the sum
// against what a training step really takes from the heap.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <thread>

#include "model/cut_batch.h"
#include "plan/memory.h"
#include "plan/plan.h"
#include "tests/thread_ranks.h"
#include "tests/tiny_models.h"
#include "train/optimizer.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED
#endif

#if defined(__GLIBC__) && !defined(SANITIZED)
#define COUNTS_HEAP
#include <malloc.h>

// Every byte of the heap, by the C library's own functions under the names that it keeps for this.
namespace {
std::atomic<std::int64_t> held{0}, peak{0};
void* count(void* p) {
  const std::int64_t now = held += static_cast<std::int64_t>(malloc_usable_size(p));
  std::int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return p;
}
}  // namespace

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void __libc_free(void*);
void* malloc(std::size_t n) { return count(__libc_malloc(n)); }
void* aligned_alloc(std::size_t a, std::size_t n) { return count(__libc_memalign(a, n)); }
void* calloc(std::size_t n, std::size_t size) { return count(__libc_calloc(n, size)); }
void* realloc(void* p, std::size_t n) {
  held -= static_cast<std::int64_t>(malloc_usable_size(p));
  return count(__libc_realloc(p, n));
}
void free(void* p) {
  held -= static_cast<std::int64_t>(malloc_usable_size(p));
  __libc_free(p);
}
}
#endif

namespace winnow::plan {
namespace {

using attention::AttentionMode;

PlanConfig config_of(const model::ModelConfig& model) {
  PlanConfig c;
  c.model = model;
  c.stages = {{"sparse", AttentionMode::kSparse, true}};
  c.context = 64;
  c.machine = "cpu-core";
  return c;
}

double parameters_of(const PlanConfig& c, const PipelineLayout& layout) {
  double sum = 0;
  for (const Stage& stage : layout.stages) sum += stage_parameters(c, stage);
  return sum;
}

TEST(PlanMemory, StagesHoldTheModelsParameters) {
  auto models = model::tiny_models();
  for (const auto& model : model::pool_models()) models.push_back(model);
  for (auto [name, model] : models) {
    for (const std::int64_t mtp : {0, 3}) {
      for (const std::int64_t freq : {1, 2}) {
        model.layers = 5;
        model.mtp_depths = mtp;
        model.sharing = {freq, 1};
        const PlanConfig c = config_of(model);
        const auto all = static_cast<double>(model::parameter_count(model));
        EXPECT_EQ(parameters_of(c, even_layout(1, 1, 5, mtp)), all) << name << mtp << freq;
        // On more ranks, tables that two of them need lie twice.
        const double table = static_cast<double>(model.vocab_size * model.attention.hidden_size);
        const double twice = model.tied_embeddings || mtp > 0 ? table : 0;
        EXPECT_EQ(parameters_of(c, even_layout(3, 1, 5, mtp)), all + twice) << name << mtp << freq;
      }
    }
  }
}

TEST(PlanMemory, ExpertsAreSpreadOverTheirRanks) {
  PlanConfig c = config_of(model::tiny_model(model::tiny_mla()));
  const double dense = layer_parameters(c, 1);
  c.moe = {8, 2, 1, 6, 1};
  EXPECT_EQ(layer_parameters(c, 1), dense);  // the first layer has a plain MLP
  const double h = 12, one = 3 * h * 6, router = (h + 1) * 8;
  EXPECT_EQ(layer_parameters(c, 2), dense - 3 * h * 10 + 9 * one + router);
  c.ep = 4;
  EXPECT_EQ(layer_parameters(c, 2), dense - 3 * h * 10 + 3 * one + router);
}

TEST(PlanMemory, MicroBatchesInFlight) {
  for (std::int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(micro_batches_in_flight(4, 1, 16, rank, 0), 4 - rank);
    EXPECT_EQ(micro_batches_in_flight(4, 1, 2, rank, 0), std::min<std::int64_t>(2, 4 - rank));
  }
  // Two virtual stages: rank 0 of 4 holds 3 * 2 + 4 + 1 = 11 of them: 4, 4, then 3 more.
  EXPECT_EQ(micro_batches_in_flight(4, 2, 16, 0, 0), 7);
  EXPECT_EQ(micro_batches_in_flight(4, 2, 16, 0, 1), 4);
  EXPECT_EQ(micro_batches_in_flight(4, 2, 16, 3, 0), 4);
  EXPECT_EQ(micro_batches_in_flight(4, 2, 16, 3, 1), 1);
}

// The table of the contract: rows of a chunk and launches of 16384 rows of rank 0.
TEST(PlanMemory, ScoreChunksOfAMillionTokens) {
  PlanConfig c = config_of(model::tiny_model(model::tiny_mla()));
  c.context = 1 << 20;
  c.cp = 64;
  EXPECT_EQ(score_chunks(c).rows, 256);
  EXPECT_EQ(score_chunks(c).count, 64);
  c.score_budget_gib = 8;
  EXPECT_EQ(score_chunks(c).rows, 1024);
  EXPECT_EQ(score_chunks(c).count, 16);
  c.model.attention.indexer.pool_size = 4;
  EXPECT_EQ(score_chunks(c).rows, 4096);
  c.model.attention.indexer.pool_size = 1;
  c.context = 131072;
  c.cp = 32;
  c.score_budget_gib = 2;
  EXPECT_EQ(score_chunks(c).rows, 2048);
  EXPECT_EQ(score_chunks(c).count, 2);
}

StageMemory memory_of(const PlanConfig& c) {
  const PipelineLayout layout = even_layout(c.pp, 1, c.model.layers, c.model.mtp_depths);
  return stage_memory(c, layout, layout.stages.front());
}

// What each option takes away, and nothing else.
TEST(PlanMemory, OptionsTakeAwayWhatTheySay) {
  PlanConfig c = config_of(model::tiny_model(model::tiny_mla()));
  c.model.layers = 4;
  const StageMemory all = memory_of(c);
  c.recompute.mlp = true;
  EXPECT_EQ(all.activations - memory_of(c).activations, 4 * 64 * 3 * 10 * 4);
  EXPECT_EQ(memory_of(c).temporaries - all.temporaries, 64 * 3 * 10 * 4);
  c.recompute = {};
  c.recompute.core_attention = true;
  EXPECT_EQ(memory_of(c).selections, 0);
  c.recompute.reuse_checkpoint_topk = true;
  EXPECT_EQ(memory_of(c).selections, all.selections);
  EXPECT_EQ(all.selections, 4 * 64 * (4 + 1) * 4);
  c.recompute = {};
  c.recompute.full = true;  // the input of every layer, the end and its norm
  EXPECT_EQ(memory_of(c).activations, (4 + 2) * 64 * 12 * 4 + 64 * 4);
  c.recompute = {};
  c.model.sharing = {4, 1};
  EXPECT_EQ(memory_of(c).selections * 4, all.selections);
  c.cp = 2;  // half of the rows, and tables
  EXPECT_EQ(memory_of(c).tables - all.tables, 32 * 8 * (1 + 2 * 2));
  c.dp = 3;
  c.shard_optimizer = true;
  EXPECT_EQ(memory_of(c).optimizer * 6, memory_of(c).gradients * 2);
}

#ifdef COUNTS_HEAP
// A model whose tensors are large beside what a process needs anyway.
model::ModelConfig small_model() {
  model::ModelConfig m = model::tiny_model(model::tiny_mla());
  m.vocab_size = 256;
  m.layers = 3;
  m.intermediate_size = 192;
  attention::AttentionConfig& a = m.attention;
  a.hidden_size = 96;
  a.heads = 4;
  a.q_lora_rank = 64;
  a.kv_lora_rank = 32;
  a.qk_nope_head_dim = 24;
  a.qk_rope_head_dim = 8;
  a.v_head_dim = 24;
  a.max_positions = 512;
  a.indexer.index_heads = 8;
  a.indexer.index_dim = 32;
  a.indexer.topk = 48;
  a.indexer.rope_dim = 8;
  return m;
}

// The highest number of bytes that a step holds, of weights, gradients, optimizer and everything
// else.
void train_step(const PlanConfig& c, const model::Batch& batch) {
  model::Transformer transformer(c.model, DType::kF32, 1);
  train::AdamW optimizer(transformer.parameters(), {});
  model::StepOptions options;
  options.mode = c.mode().attention;
  options.index_loss_scale = c.mode().index_loss ? 1 : 0;
  options.recompute = c.recompute;
  if (c.mode().attention != AttentionMode::kWarmup) {
    options.mtp_loss_scales.assign(static_cast<std::size_t>(c.model.mtp_depths), 1);
  }
  transformer.step(batch, options);
  optimizer.step(1e-3, {});
}

// Of one rank. All of a context group run here, as threads, and wait for each other.
double measured(const PlanConfig& c) {
  const auto length = static_cast<std::int32_t>(c.context);
  model::Batch batch = model::packed_batch({length}, 256, 1);
  model::add_mtp_tokens(batch, c.model.mtp_depths);
  const std::int64_t before = held;
  peak = before;
  if (c.cp == 1) {
    train_step(c, batch);
  } else {
    testing::run_ranks(c.cp, [&](testing::ThreadCommunicator& group) {
      train_step(c, model::share_batch(batch, group));
    });
  }
  return static_cast<double>(peak - before) / static_cast<double>(c.cp);
}

TEST(PlanMemory, AStepTakesWhatWasPlanned) {
  std::vector<PlanConfig> plans(16, config_of(small_model()));
  for (PlanConfig& c : plans) c.context = 512;
  plans[1].recompute.full = true;
  plans[2].recompute.core_attention = plans[2].recompute.mlp = true;
  plans[3].model.sharing = {2, 1};
  plans[3].recompute.full = plans[3].recompute.reuse_checkpoint_topk = true;
  plans[4].stages = {{"warm-up", AttentionMode::kWarmup, true}};
  plans[5].stages = {{"dense", AttentionMode::kDense, false}};
  plans[6].model.mtp_depths = 3;
  plans[7].model.mtp_depths = 3;
  plans[7].model.mtp_shared_components = {true, true};
  plans[7].recompute.full = true;
  for (const std::size_t i : {8, 9, 10, 11}) plans[i].cp = 2;
  plans[9].recompute.full = true;
  plans[10].stages = plans[4].stages;
  plans[11] = plans[7];
  plans[11].cp = 4;
  for (std::size_t i = 12; i < 16; ++i) {
    plans[i].model.attention.indexer.pool_size = 4;
    plans[i].stages[0].index_loss = false;
  }
  plans[13].recompute.full = true;
  plans[14].model.attention.indexer.precision = attention::SelectionPrecision::kE4m3;
  plans[14].model.attention.indexer.hadamard = false;
  plans[15].cp = 2;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const testing::ThreadsGuard threads(plans[i].cp > 1 ? 1 : num_threads());
    const double planned = memory_of(plans[i]).total();
    double real = 0;  // in a thread of its own: what a thread keeps for later calls counts, too
    std::thread([&] { real = measured(plans[i]); }).join();
    EXPECT_NEAR(planned / real, 1, 0.05) << "plan " << i << ": " << planned << " for " << real;
  }
}
#endif

}  // namespace
}  // namespace winnow::plan
