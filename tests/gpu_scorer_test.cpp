// index_scores and index_topk on GPUs, what the shared problems cannot show: heads and channels around
// every limit of the kernels, strides and addresses, rows alone, graphs. Skips where there is no GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#if defined(WINNOW_CUDA)
#include <cuda_runtime.h>
#endif

#include "base/array.h"
#include "base/device.h"
#include "bench/case.h"
#include "bench/data.h"
#include "winnow/index_scores.h"
#include "winnow/index_topk.h"

namespace winnow {
namespace {

constexpr Device kGpu{Device::Kind::kCuda, 0};

#define SKIP_WITHOUT_GPU() \
  if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal()

struct Sweep {
  int heads, dim;
};

class GpuScorerSweep : public testing::TestWithParam<Sweep> {};

TEST_P(GpuScorerSweep, MatchesTheReference) {
  SKIP_WITHOUT_GPU();
  const auto [heads, dim] = GetParam();
  for (const char* dtype : {"f32", "bf16", "f16", "e4m3", "mxfp8"}) {
    if (std::string(dtype) == "mxfp8" && dim % 32 != 0) continue;
    for (const char* problem :
         {"index_scores rows=25 keys=150 range=awkward",
          "index_scores rows=11 keys=131 range=causal weights=bf16 relu=0 width=77 specials=1",
          "index_scores rows=17 keys=90 range=packed page=7 dot_scale=1 specials=1",
          "index_topk rows=13 keys=200 topk=30 range=packed specials=1 page=16 keep_first=3"}) {
      const std::string text =
          fmt::format("{} index_heads={} index_dim={} dtype={}", problem, heads, dim, dtype);
      const std::vector<bench::CheckResult> results = bench::check_problem(text, kGpu);
      EXPECT_FALSE(results.empty()) << text;
      for (const bench::CheckResult& r : results)
        EXPECT_EQ(r.failure, "") << r.implementation << ": " << r.problem;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuScorerSweep,
                         testing::Values(Sweep{1, 1}, Sweep{3, 17}, Sweep{7, 33}, Sweep{8, 64},
                                         Sweep{9, 65}, Sweep{16, 31}, Sweep{24, 96}, Sweep{32, 128},
                                         Sweep{33, 129}, Sweep{63, 127}, Sweep{64, 128},
                                         Sweep{65, 32}, Sweep{72, 255}, Sweep{96, 192},
                                         Sweep{127, 63}, Sweep{128, 256}),
                         [](const auto& test) {
                           return fmt::format("heads{}dim{}", test.param.heads, test.param.dim);
                         });

// Device memory that begins with a tensor of the host.
class Twin {
 public:
  explicit Twin(const Tensor& host)
      : bytes_(host.elements() * dtype_bytes(host.dtype)), memory_(kGpu, bytes_), view_(host) {
    view_.data = memory_.data();
    view_.device = kGpu;
    upload(host);
  }
  void upload(const Tensor& host) { copy_to_device(kGpu, memory_.data(), host.data, bytes_); }
  std::vector<std::uint32_t> words() const {
    synchronise(kGpu);
    std::vector<std::uint32_t> all(static_cast<std::size_t>(bytes_ / 4));
    copy_to_host(kGpu, all.data(), memory_.data(), bytes_);
    return all;
  }
  const Tensor& view() const { return view_; }

 private:
  std::int64_t bytes_;
  DeviceMemory memory_;
  Tensor view_;
};

Array gauss(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed) {
  Array array(dtype, shape);
  bench::Random random(seed);
  bench::fill_gauss(array, random);
  return array;
}
Array poison(DType dtype, std::initializer_list<std::int64_t> shape) {
  Array array(dtype, shape);
  std::memset(array.view().data, 0x7f, static_cast<std::size_t>(array.view().elements()) * 4);
  return array;
}

// A call with 64 heads of 128 channels, which every implementation takes in bf16.
class GpuScorer : public testing::Test {
 protected:
  static constexpr std::int64_t kRows = 37, kKeys = 700, kHeads = 64, kDim = 128, kTopk = 90;

  void SetUp() override { SKIP_WITHOUT_GPU(); }

  // Rows of every length; `round` moves all of them.
  static void set_ranges(std::int64_t round, const Array& starts, const Array& ends) {
    for (std::int64_t i = 0; i < kRows; ++i) {
      starts.as<std::int32_t>()[i] = static_cast<std::int32_t>((13 * i + 50 * round) % 300 - 5);
      ends.as<std::int32_t>()[i] = static_cast<std::int32_t>((101 * i + 77 * round) % (kKeys + 40));
    }
  }
};

struct Inputs {
  Array starts, ends;
  Twin query, key, weights, gpu_starts, gpu_ends;

  Inputs(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim)
      : starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        query(gauss(dtype, {rows, heads, dim}, 1)),
        key(gauss(dtype, {keys, dim}, 2)),
        weights(gauss(DType::kF32, {rows, heads}, 3)),
        gpu_starts(starts),
        gpu_ends(ends) {}
  void upload_ranges() {
    gpu_starts.upload(starts);
    gpu_ends.upload(ends);
  }
  template <class Args>
  Args args() const {
    Args a{};
    a.index_query = query.view();
    a.index_key = key.view();
    a.index_weights = weights.view();
    a.starts = gpu_starts.view();
    a.ends = gpu_ends.view();
    return a;
  }
};

std::vector<std::string> accepting(const Explanation& explanation) {
  std::vector<std::string> all;
  for (const Verdict& v : explanation.verdicts)
    if (v.refusal.empty()) all.push_back(v.implementation);
  return all;
}

void score(const IndexScoresArgs& args, Stream stream = {}) {
  const DeviceMemory workspace(kGpu, index_scores_workspace_bytes(args));
  index_scores(args, {workspace.data(), workspace.bytes(), stream});
  synchronise(kGpu);
}

TEST_F(GpuScorer, ARowAloneHasTheBitsThatItHasAmongOthers) {
  Inputs inputs(DType::kBF16, kRows, kKeys, kHeads, kDim);
  set_ranges(0, inputs.starts, inputs.ends);
  inputs.upload_ranges();
  const Array empty = poison(DType::kF32, {kRows, kKeys});
  const Twin together(empty), alone(empty);
  IndexScoresArgs args = inputs.args<IndexScoresArgs>();
  args.index_scores = together.view();
  for (const std::string& implementation : accepting(explain(args))) {
    const bench::PinGuard pin("index_scores", implementation);
    args.index_scores = together.view();
    score(args);
    for (std::int64_t i = 0; i < kRows; ++i) {
      IndexScoresArgs one = args;
      one.index_query = args.index_query.rows(i, 1);
      one.index_weights = args.index_weights.rows(i, 1);
      one.starts = args.starts.rows(i, 1);
      one.ends = args.ends.rows(i, 1);
      one.index_scores = alone.view().rows(i, 1);
      score(one);
    }
    EXPECT_EQ(alone.words(), together.words()) << implementation;
  }
}

// Numbers that lie apart, at addresses that no vector load takes, have the scores of the same side by
// side.
TEST_F(GpuScorer, StridesAndAddressesChangeNoBit) {
  constexpr std::int64_t kSomeHeads = 5, kSomeDim = 40, kPad = 3;
  const bench::PinGuard pin("index_scores", "cuda.portable");
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3}) {
    const Array query = gauss(dtype, {kRows, kSomeHeads, kSomeDim + kPad}, 1);
    const Array key = gauss(dtype, {kKeys, kSomeDim + kPad}, 2);
    const Array weights = gauss(DType::kF32, {kSomeHeads, kRows}, 3);
    const Array key_scale = gauss(DType::kF32, {kKeys, 2}, 4);
    const Array starts(DType::kI32, {kRows}), ends(DType::kI32, {kRows});
    set_ranges(1, starts, ends);
    const Array packed_query(dtype, {kRows, kSomeHeads, kSomeDim}),
        packed_key(dtype, {kKeys, kSomeDim});
    const Array packed_weights(DType::kF32, {kRows, kSomeHeads}),
        packed_scale(DType::kF32, {kKeys});
    const std::int64_t size = dtype_bytes(dtype);
    auto pack = [&](const Array& from, const Array& to) {
      for (std::int64_t i = 0; i < to.view().elements() / kSomeDim; ++i)
        std::memcpy(to.as<char>() + i * kSomeDim * size,
                    from.as<char>() + (i * (kSomeDim + kPad) + 1) * size,
                    static_cast<std::size_t>(kSomeDim * size));
    };
    pack(query, packed_query);
    pack(key, packed_key);
    for (std::int64_t i = 0; i < kRows; ++i)
      for (std::int64_t h = 0; h < kSomeHeads; ++h)
        packed_weights.as<float>()[i * kSomeHeads + h] = weights.as<float>()[h * kRows + i];
    for (std::int64_t j = 0; j < kKeys; ++j)
      packed_scale.as<float>()[j] = key_scale.as<float>()[2 * j];

    const Array empty = poison(DType::kF32, {kRows, kKeys});
    const Twin q(query), k(key), w(weights), s(key_scale), a(starts), b(ends), strided(empty);
    const Twin pq(packed_query), pk(packed_key), pw(packed_weights), ps(packed_scale),
        packed(empty);
    IndexScoresArgs args;
    args.starts = a.view();
    args.ends = b.view();
    args.index_query = q.view().channels(1, kSomeDim);
    args.index_key = k.view().channels(1, kSomeDim);
    args.index_weights = w.view().transposed();
    args.index_scores = strided.view();
    if (dtype == DType::kE4M3) {
      args.index_key_scale = s.view();
      args.index_key_scale.rank = 1;
    }
    score(args);
    args.index_query = pq.view();
    args.index_key = pk.view();
    args.index_weights = pw.view();
    args.index_scores = packed.view();
    if (dtype == DType::kE4M3) args.index_key_scale = ps.view();
    score(args);
    EXPECT_EQ(strided.words(), packed.words()) << dtype_name(dtype);
  }
}

#if defined(WINNOW_CUDA)
void check_cuda(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// Captured once, replayed with other ranges and queries in the same memory, against calls. The budget
// cuts the rows of index_topk into several chunks.
TEST_F(GpuScorer, GraphsReplayWithOtherValues) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream));
  Inputs inputs(DType::kBF16, kRows, kKeys, kHeads, kDim);
  const Array empty = poison(DType::kF32, {kRows, kKeys});
  const Array no_ids = poison(DType::kI32, {kRows, kTopk}),
              no_lengths = poison(DType::kI32, {kRows});
  Twin scores(empty), ids(no_ids), lengths(no_lengths), payload(no_ids);
  IndexScoresArgs score_args = inputs.args<IndexScoresArgs>();
  score_args.index_scores = scores.view();
  IndexTopkArgs topk_args = inputs.args<IndexTopkArgs>();
  topk_args.topk_indices = ids.view();
  topk_args.topk_lengths = lengths.view();
  topk_args.topk_scores = payload.view();
  topk_args.topk_scores.dtype = DType::kF32;
  topk_args.workspace_budget = 60000;
  for (const std::string& implementation : accepting(explain(topk_args))) {
    const bench::PinGuard pin_scores("index_scores", implementation);
    const bench::PinGuard pin_topk("index_topk", implementation);
    const DeviceMemory score_memory(kGpu, index_scores_workspace_bytes(score_args));
    const DeviceMemory topk_memory(kGpu, index_topk_workspace_bytes(topk_args));
    auto call = [&] {
      index_scores(score_args, {score_memory.data(), score_memory.bytes(), {stream}});
      index_topk(topk_args, {topk_memory.data(), topk_memory.bytes(), {stream}});
    };
    auto clear = [&] {
      scores.upload(empty);
      ids.upload(no_ids);
      lengths.upload(no_lengths);
      payload.upload(no_ids);
    };
    auto results = [&] {
      return std::vector{scores.words(), ids.words(), lengths.words(), payload.words()};
    };
    call();  // the kernels are loaded
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    call();
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&replay, graph, 0));
    std::vector<std::vector<std::uint32_t>> before;
    for (std::int64_t round = 0; round < 3; ++round) {
      set_ranges(round, inputs.starts, inputs.ends);
      inputs.upload_ranges();
      inputs.query.upload(
          gauss(DType::kBF16, {kRows, kHeads, kDim}, 100 + static_cast<std::uint64_t>(round)));
      clear();
      call();
      const auto called = results();
      clear();
      check_cuda(cudaGraphLaunch(replay, stream));
      EXPECT_EQ(results(), called) << implementation << " round " << round;
      EXPECT_NE(called, before);
      before = called;
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}
#endif

}  // namespace
}  // namespace winnow
