// What the shared problems cannot show of attention and the indexer's loss on GPUs: a row has the
// same bits alone and in a batch, a score has the bits that index_scores gives it, and a captured
// call is right when it is replayed with other lists. Skips where there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "bench/attention.h"
#include "bench/case.h"
#include "bench/loss_data.h"
#include "bench/placement.h"
#include "winnow/device.h"
#include "winnow/index_scores.h"
#include "winnow/index_scores_at.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"

#if defined(WINNOW_CUDA)
#include <cuda_runtime.h>
#endif

namespace winnow::bench {
namespace {

constexpr Device kGpu{Device::Kind::kCuda, 0};

class GpuAttention : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal();
  }
};

std::vector<unsigned char> bytes_of(const Tensor& t) {
  const auto* p = t.as<unsigned char>();
  return {p, p + t.elements() * dtype_bytes(t.dtype)};
}

Tensor row_of(const Tensor& t, std::int64_t i) { return t.empty() ? t : t.rows(i, 1); }

// A problem of sparse_attention with its outputs.
struct Forward {
  AttentionInputs in;
  Guarded output, lse;

  explicit Forward(const std::string& problem, std::int64_t page = 0)
      : in(Problem::parse(problem), page),
        output(in.dtype, {in.rows, in.heads, in.dim_v}),
        lse(DType::kF32, {in.rows, in.heads}) {}

  SparseAttentionArgs args() const {
    return {in.query,
            in.key.view(),
            in.value_or_nothing(),
            in.indices_or_nothing(),
            in.lengths_or_nothing(),
            in.starts,
            in.ends,
            in.softmax_scale,
            output,
            lse};
  }
  SparseAttentionArgs row(std::int64_t i) const {
    SparseAttentionArgs a = args();
    for (Tensor* t : {&a.query, &a.key.row_request, &a.topk_indices, &a.topk_lengths, &a.starts,
                      &a.ends, &a.output, &a.lse}) {
      *t = row_of(*t, i);
    }
    return a;
  }
};

void run(const SparseAttentionArgs& args) {
  run_once(sparse_attention_workspace_bytes(placed(args)),
           [&](Workspace workspace) { sparse_attention(placed(args), workspace); });
}

// Many rows get large blocks, one row small ones; the bits are the same.
TEST_F(GpuAttention, ARowAloneHasTheBitsOfTheBatch) {
  struct Trial {
    const char* problem;
    std::int64_t page;
  };
  const Trial trials[] = {
      {"sparse_attention rows=140 keys=300 heads=64 topk=100 ids=scattered dtype=bf16", 0},
      {"sparse_attention rows=140 keys=300 heads=40 dim_qk=512 topk=70 lengths=1 dtype=f16", 16},
      {"sparse_attention rows=140 keys=900 heads=100 topk=700 ids=scattered lengths=1 dtype=bf16",
       64},
      {"sparse_attention rows=40 keys=400 heads=64 dim_qk=512 topk=0 range=causal dtype=bf16", 0},
      {"sparse_attention rows=280 keys=200 heads=24 dim_qk=100 dim_v=90 topk=0 range=causal "
       "dtype=bf16",
       0},
      {"sparse_attention rows=140 keys=200 heads=64 kv_heads=2 dim_qk=192 dim_v=128 value=1 "
       "topk=90 ids=scattered dtype=bf16",
       0},
      {"sparse_attention rows=20 keys=200 heads=12 topk=90 ids=scattered", 0}};
  for (const Trial& trial : trials) {
    SCOPED_TRACE(trial.problem);
    const Forward forward(trial.problem, trial.page);
    const Placement placement(kGpu);
    run(forward.args());
    for (std::int64_t i = 0; i < forward.in.rows; i += 19) {
      const SparseAttentionArgs alone = forward.row(i);
      const auto output = bytes_of(alone.output), lse = bytes_of(alone.lse);
      poison(alone.output);
      poison(alone.lse);
      run(alone);
      EXPECT_EQ(bytes_of(alone.output), output) << "row " << i;
      EXPECT_EQ(bytes_of(alone.lse), lse) << "row " << i;
    }
  }
}

TEST_F(GpuAttention, AScoreAtAKeyHasTheBitsOfIndexScores) {
  const char* problems[] = {
      "index_scores_at rows=9 keys=300 index_heads=64 index_dim=128 topk=100 dtype=bf16",
      "index_scores_at rows=9 keys=300 index_heads=3 index_dim=17 topk=70 dtype=f16 range=causal",
      "index_scores_at rows=9 keys=300 index_heads=70 index_dim=64 topk=70 dtype=bf16 relu=0",
      "index_scores_at rows=9 keys=300 index_heads=128 index_dim=256 topk=70 dtype=bf16",
      "index_scores_at rows=9 keys=300 index_heads=40 index_dim=200 topk=70 dtype=f16",
      "index_scores_at rows=9 keys=300 index_heads=37 index_dim=96 topk=100 ids=scattered"};
  const PinGuard pinned("index_scores", "cuda.portable");
  for (const char* text : problems) {
    SCOPED_TRACE(text);
    const Problem p = Problem::parse(text);
    Random random(7);
    const ListData lists(p, random, true);
    const IndexerData indexer(p, random);
    const Guarded at(DType::kF32, {lists.rows, lists.topk});
    const Guarded all(DType::kF32, {lists.rows, lists.keys});
    const bool relu = p.flag("relu");
    const IndexScoresAtArgs args = {
        indexer.query, indexer.key, indexer.weights, lists.indices, lists.starts, lists.ends,
        relu,          at};
    IndexScoresArgs every;
    every.index_query = indexer.query;
    every.index_key = indexer.key.view();
    every.index_weights = indexer.weights;
    every.starts = lists.starts;
    every.ends = lists.ends;
    every.relu = relu;
    every.index_scores = all;
    const Placement placement(kGpu);
    run_once(index_scores_at_workspace_bytes(placed(args)),
             [&](Workspace workspace) { index_scores_at(placed(args), workspace); });
    run_once(index_scores_workspace_bytes(placed(every)),
             [&](Workspace workspace) { index_scores(placed(every), workspace); });
    for (std::int64_t i = 0; i < lists.rows; ++i) {
      for (std::int64_t s = 0; s < lists.topk; ++s) {
        const std::int64_t id = lists.id(i, s);
        if (id < 0) continue;
        const float* score = at.view().as<float>() + i * lists.topk + s;
        const float* expected = all.view().as<float>() + i * lists.keys + id - lists.range(i).start;
        ASSERT_EQ(std::memcmp(score, expected, 4), 0)
            << "row " << i << " slot " << s << ": " << *score << " and " << *expected;
      }
    }
  }
}

#if defined(WINNOW_CUDA)
void run(const SparseAttentionBackwardArgs& args) {
  run_once(sparse_attention_backward_workspace_bytes(placed(args)),
           [&](Workspace workspace) { sparse_attention_backward(placed(args), workspace); });
}

// Captures a call, changes its lists where they lie, replays it.
TEST_F(GpuAttention, AReplayReadsTheListsThatAreThereThen) {
  for (const char* shape : {"heads=20 dim_qk=80 dim_v=64 dtype=f32",
                            "heads=20 dim_qk=80 dim_v=64 dtype=bf16", "heads=64 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    const Forward forward(
        std::string("sparse_attention rows=30 keys=300 topk=100 lengths=1 range=causal ") + shape);
    const AttentionInputs& in = forward.in;
    const Guarded d_output(in.dtype, {in.rows, in.heads, in.dim_v});
    const Guarded d_query(DType::kF32, {in.rows, in.heads, in.dim_qk});
    const Guarded d_key(DType::kF32, {in.keys, in.kv_heads, in.dim_qk});
    Random random(3);
    fill_gauss(d_output, random);
    const SparseAttentionArgs args = forward.args();
    const SparseAttentionBackwardArgs backward = {in.query,
                                                  in.key.data(),
                                                  {},
                                                  args.topk_indices,
                                                  args.topk_lengths,
                                                  args.starts,
                                                  args.ends,
                                                  args.softmax_scale,
                                                  args.output,
                                                  args.lse,
                                                  d_output,
                                                  d_query,
                                                  d_key,
                                                  {}};
    Placement placement(kGpu);
    warmup(kGpu);
    const SparseAttentionArgs there = placed(args);
    const SparseAttentionBackwardArgs there_too = placed(backward);
    const FencedMemory memory(kGpu, sparse_attention_workspace_bytes(there));
    const FencedMemory memory_too(kGpu, sparse_attention_backward_workspace_bytes(there_too));
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    sparse_attention(there, {memory.data(), memory.bytes(), {stream}});
    sparse_attention_backward(there_too, {memory_too.data(), memory_too.bytes(), {stream}});
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);

    auto* ids = args.topk_indices.as<std::int32_t>();
    std::reverse(ids, ids + args.topk_indices.elements());
    for (std::int64_t i = 0; i < in.rows; ++i) {
      args.topk_lengths.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % 7 * 20);
      args.starts.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
    }
    placement.upload();
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    placement.download();
    const auto output = bytes_of(args.output), query = bytes_of(d_query), key = bytes_of(d_key);
    for (const Tensor& t : {args.output, d_query.view(), d_key.view()}) poison(t);
    run(args);
    EXPECT_EQ(bytes_of(args.output), output);
    run(backward);
    EXPECT_EQ(bytes_of(d_query), query);
    EXPECT_EQ(bytes_of(d_key), key);
    memory.check();
    memory_too.check();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}
#endif

}  // namespace
}  // namespace winnow::bench
