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
void run(const SparseAttentionBackwardArgs& args) {
  run_once(sparse_attention_backward_workspace_bytes(placed(args)),
           [&](Workspace workspace) { sparse_attention_backward(placed(args), workspace); });
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

// A problem of sparse_attention_backward, its forward done; the value lies in the key.
struct Backward {
  Forward forward;
  Guarded d_output, d_query, d_key;

  explicit Backward(const std::string& problem)
      : forward(problem),
        d_output(in().dtype, {in().rows, in().heads, in().dim_v}),
        d_query(DType::kF32, {in().rows, in().heads, in().dim_qk}),
        d_key(DType::kF32, {in().keys, in().kv_heads, in().dim_qk}) {
    Random random(3);
    fill_gauss(d_output, random);
  }
  const AttentionInputs& in() const { return forward.in; }
  SparseAttentionBackwardArgs args() const {
    const SparseAttentionArgs a = forward.args();
    return {
        in().query,      in().key.data(), {},    a.topk_indices, a.topk_lengths, a.starts, a.ends,
        a.softmax_scale, a.output,        a.lse, d_output,       d_query,        d_key,    {}};
  }
};

// d_query of a row, and the gradient of a key that one row lists, do not depend on the others.
TEST_F(GpuAttention, GradientsOfARowAloneHaveTheBitsOfTheBatch) {
  const char* problems[] = {
      "sparse_attention rows=9 keys=400 heads=64 topk=200 ids=scattered lengths=1 dtype=bf16",
      "sparse_attention rows=9 keys=400 heads=100 dim_qk=512 topk=130 dtype=bf16",
      "sparse_attention rows=9 keys=200 heads=12 dim_qk=80 dim_v=64 topk=90 ids=scattered"};
  for (const char* problem : problems) {
    SCOPED_TRACE(problem);
    const Backward call(problem);
    const Placement placement(kGpu);
    run(call.forward.args());
    const SparseAttentionBackwardArgs args = call.args();
    run(args);
    const auto together = bytes_of(call.d_key);
    std::vector<int> listed(static_cast<std::size_t>(call.in().keys));
    for (std::int64_t i = 0; i < call.in().rows; ++i)
      for (const std::int64_t id : call.in().slots(i)) ++listed[static_cast<std::size_t>(id)];
    const std::size_t key_bytes = together.size() / listed.size();
    for (std::int64_t i = 0; i < call.in().rows; ++i) {
      SparseAttentionBackwardArgs alone = args;
      for (Tensor* t : {&alone.query, &alone.topk_indices, &alone.topk_lengths, &alone.starts,
                        &alone.ends, &alone.output, &alone.lse, &alone.d_output, &alone.d_query}) {
        *t = row_of(*t, i);
      }
      const auto d_query = bytes_of(alone.d_query);
      poison(alone.d_query);
      poison(alone.d_key);
      run(alone);
      EXPECT_EQ(bytes_of(alone.d_query), d_query) << "row " << i;
      const auto d_key = bytes_of(alone.d_key);
      for (const std::int64_t id : call.in().slots(i)) {
        if (listed[static_cast<std::size_t>(id)] != 1) continue;
        const std::size_t at = static_cast<std::size_t>(id) * key_bytes;
        EXPECT_EQ(std::memcmp(d_key.data() + at, together.data() + at, key_bytes), 0)
            << "row " << i << " key " << id;
      }
    }
  }
}

// Views whose rows begin at no multiple of 16 bytes, or 8 of the output.
TEST_F(GpuAttention, GradientsOfMisalignedViewsHaveTheBitsOfCopies) {
  const Backward call("sparse_attention rows=3 keys=90 heads=20 topk=70 ids=scattered dtype=bf16");
  const Placement placement(kGpu);
  run(call.forward.args());
  const SparseAttentionBackwardArgs args = call.args();
  run(args);
  const AttentionInputs& in = call.in();
  const Guarded query(in.dtype, {in.rows, in.heads, 584}), key(in.dtype, {in.keys, 1, 584});
  const Guarded d_output(in.dtype, {in.rows, in.heads, 520});
  const Guarded d_query(DType::kF32, {in.rows, in.heads, 577}),
      d_key(DType::kF32, {in.keys, 1, 577});
  SparseAttentionBackwardArgs moved = args;
  auto move = [](Tensor& t, const Tensor& wide, bool fill) {
    const Tensor from = t;
    t = wide.channels(1, from.shape[2]);
    const std::int64_t bytes = dtype_bytes(t.dtype);
    for (std::int64_t i = 0; fill && i < t.shape[0]; ++i) {
      for (std::int64_t h = 0; h < t.shape[1]; ++h) {
        std::memcpy(t.as<char>() + (i * t.strides[0] + h * t.strides[1]) * bytes,
                    from.as<char>() + (i * from.strides[0] + h * from.strides[1]) * bytes,
                    static_cast<std::size_t>(t.shape[2] * bytes));
      }
    }
  };
  move(moved.query, query, true);
  move(moved.key, key, true);
  move(moved.d_output, d_output, true);
  move(moved.d_query, d_query, false);
  move(moved.d_key, d_key, false);
  run(moved);
  for (const auto& [there, here] :
       {std::pair(moved.d_query, args.d_query), std::pair(moved.d_key, args.d_key)}) {
    for (std::int64_t i = 0; i < here.shape[0]; ++i) {
      for (std::int64_t h = 0; h < here.shape[1]; ++h) {
        EXPECT_EQ(std::memcmp(there.as<float>() + i * there.strides[0] + h * there.strides[1],
                              here.as<float>() + i * here.strides[0] + h * here.strides[1],
                              static_cast<std::size_t>(here.shape[2]) * 4),
                  0)
            << "row " << i << " head " << h;
      }
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
// Captures a call, changes its lists where they lie, replays it.
TEST_F(GpuAttention, AReplayReadsTheListsThatAreThereThen) {
  for (const char* shape : {"heads=20 dim_qk=80 dim_v=64 dtype=f32",
                            "heads=20 dim_qk=80 dim_v=64 dtype=bf16", "heads=64 dtype=bf16"}) {
    SCOPED_TRACE(shape);
    const Backward call(
        std::string("sparse_attention rows=30 keys=300 topk=100 lengths=1 range=causal ") + shape);
    const AttentionInputs& in = call.in();
    const SparseAttentionArgs args = call.forward.args();
    const SparseAttentionBackwardArgs backward = call.args();
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
    const auto output = bytes_of(args.output), query = bytes_of(call.d_query),
               key = bytes_of(call.d_key);
    for (const Tensor& t : {args.output, backward.d_query, backward.d_key}) poison(t);
    run(args);
    EXPECT_EQ(bytes_of(args.output), output);
    run(backward);
    EXPECT_EQ(bytes_of(call.d_query), query);
    EXPECT_EQ(bytes_of(call.d_key), key);
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
