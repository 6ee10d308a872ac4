// select_topk on GPUs against the CPU, exactly: every k around a limit of the kernels, lengths, data
// that misleads samples and overflows buffers, graphs, strides, rows of 2^31 - 1 columns.
// Skips where there is no GPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "winnow/select_topk.h"

#if defined(WINNOW_CUDA)
#include <cuda_runtime.h>
#endif

#include "base/array.h"
#include "base/device.h"
#include "base/numbers.h"
#include "base/parallel.h"
#include "bench/case.h"

namespace winnow {
namespace {

constexpr Device kGpu{Device::Kind::kCuda, 0};
constexpr std::int64_t kClusterRows = 16;  // the most that cuda.sm90 takes
using Ints = std::vector<std::int32_t>;

#define SKIP_WITHOUT_GPU() \
  if (!cuda_refusal().empty()) GTEST_SKIP() << "no GPU: " << cuda_refusal()

// Contiguous device memory for a tensor of the host.
class Twin {
 public:
  explicit Twin(const Tensor& host)
      : bytes_(host.elements() * dtype_bytes(host.dtype)), memory_(kGpu, bytes_), view_(host) {
    view_.data = memory_.data();
    view_.device = kGpu;
    upload(host);
  }
  void upload(const Tensor& host) { copy_to_device(kGpu, memory_.data(), host.data, bytes_); }
  void download(const Tensor& host) const { copy_to_host(kGpu, host.data, memory_.data(), bytes_); }
  const Tensor& view() const { return view_; }

 private:
  std::int64_t bytes_;
  DeviceMemory memory_;
  Tensor view_;
};

struct Outputs {
  Array ids, lengths, scores;
  Outputs(std::int64_t rows, std::int64_t k)
      : ids(DType::kI32, {rows, k}), lengths(DType::kI32, {rows}), scores(DType::kF32, {rows, k}) {
    for (const Tensor& t : {ids.view(), lengths.view(), scores.view()})
      std::memset(t.data, 0x77, static_cast<std::size_t>(t.elements()) * 4);
  }
  void into(SelectTopkArgs& args) const {
    args.topk_indices = ids;
    args.topk_lengths = lengths;
    args.topk_scores = scores;
  }
};
struct OutputTwins {
  Twin ids, lengths, scores;
  explicit OutputTwins(const Outputs& host)
      : ids(host.ids), lengths(host.lengths), scores(host.scores) {}
  void into(SelectTopkArgs& args) const {
    args.topk_indices = ids.view();
    args.topk_lengths = lengths.view();
    args.topk_scores = scores.view();
  }
  void download(const Outputs& host) const {
    synchronise(kGpu);
    ids.download(host.ids);
    lengths.download(host.lengths);
    scores.download(host.scores);
  }
};

// The first row that differs, in words; "" if none does.
std::string difference(const Outputs& got, const Outputs& want) {
  const std::int64_t rows = want.ids.view().shape[0], k = want.ids.view().shape[1];
  const auto bytes = static_cast<std::size_t>(k) * 4;
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int32_t n = got.lengths.as<std::int32_t>()[i];
    const std::int32_t m = want.lengths.as<std::int32_t>()[i];
    const auto *a = got.ids.as<std::int32_t>() + i * k, *b = want.ids.as<std::int32_t>() + i * k;
    const auto *x = got.scores.as<float>() + i * k, *y = want.scores.as<float>() + i * k;
    if (n == m && std::memcmp(a, b, bytes) == 0 && std::memcmp(x, y, bytes) == 0) continue;
    std::int64_t s = 0;
    while (s < k && a[s] == b[s] && std::memcmp(x + s, y + s, 4) == 0) ++s;
    if (s == k) return fmt::format("row {}: length {}, want {}", i, n, m);
    return fmt::format("row {}: length {}, want {}; slot {}: id {} score {}, want {} {}", i, n, m,
                       s, a[s], x[s], b[s], y[s]);
  }
  return "";
}

// The columns of a full, aligned f32 row that blocks of any size sample for this k: what
// src/cuda/sample_row.h does, for data that misleads it.
std::vector<std::uint32_t> sampled_columns(std::int64_t width, std::int64_t k) {
  std::vector<std::uint32_t> columns;
  auto high = [](std::uint32_t a, std::uint32_t b) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(a) * b >> 32);
  };
  for (const int log : {6, 7, 8}) {
    const int log_values = width < 48 * k ? 11 : width < 256 * k ? 12 : 13;
    const int bits = log + std::max(0, log_values - log - 4);
    const auto pieces = static_cast<std::uint32_t>(width / 16), gap = pieces >> bits;
    for (std::uint32_t u = 0; u < 1u << bits; ++u) {
      const std::uint32_t piece = high(u << (32 - bits), pieces) + high(u * 2654435761u, gap);
      for (std::uint32_t e = 0; e < 16; ++e) columns.push_back(piece * 16 + e);
    }
  }
  return columns;
}

constexpr const char* kKinds[] = {"normal",
                                  "equal",
                                  "zeros, 1 % positive",
                                  "half zeros",
                                  "one f16 bucket",
                                  "equal upper 20 bits",
                                  "ascending",
                                  "descending",
                                  "NaN and infinities",
                                  "NaN only",
                                  "-inf but a few",
                                  "zeros of either sign",
                                  "a cluster of high ones",
                                  "correlated runs",
                                  "sample too high",
                                  "sample hidden, ascending",
                                  "denormals",
                                  "integers",
                                  "one +inf, the rest equal",
                                  "-inf only",
                                  "high at the end",
                                  "wide exponents"};

void fill(std::size_t kind, float* x, std::int64_t n, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<float> gauss;
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  auto uniform = [&] { return static_cast<float>(bits() >> 40) * 0x1p-24f; };
  auto from = [](std::uint64_t u) { return std::bit_cast<float>(static_cast<std::uint32_t>(u)); };
  for (std::int64_t i = 0; i < n; ++i) {
    const auto t = static_cast<float>(i);
    float v = 0;
    switch (kind) {
      case 0: v = gauss(bits); break;
      case 1: v = -3.25f; break;
      case 2: v = uniform() < 0.01f ? uniform() : 0; break;
      case 3: v = std::max(0.f, gauss(bits)); break;
      case 4: v = from(0x3f800000u + bits() % 4096); break;
      case 5: v = from(0xc1234000u + bits() % 4096); break;
      case 6: v = t * 0.37f - 1000; break;
      case 7: v = 500 - t * 0.37f; break;
      case 8: {
        const std::uint64_t q = bits() % 24;
        v = q < 3 ? nan : q == 3 ? inf : q < 7 ? -inf : q < 10 ? -nan : gauss(bits);
        break;
      }
      case 9: v = nan; break;
      case 10: v = bits() % 97 != 0 ? -inf : gauss(bits); break;
      case 11: v = bits() % 2 != 0 ? 0.f : -0.f; break;
      case 12: v = gauss(bits) + (i >= n / 3 && i < n / 3 + 3000 ? 8.f : 0.f); break;
      case 13: v = gauss(bits) * 0.1f + (i / 16 * 2654435761 / 8192 % 23 == 0 ? 5.f : 0.f); break;
      case 14: v = gauss(bits); break;
      case 15: v = t; break;
      case 16: v = from(bits() % 3000 | (bits() % 2) << 31); break;
      case 17: v = std::nearbyint(gauss(bits) * 2); break;
      case 18: v = i == n / 2 ? inf : 1.5f; break;
      case 19: v = -inf; break;
      case 20: v = gauss(bits) * 0.01f + (i > n - 2500 ? 3.f : 0.f); break;
      default:
        v = std::ldexp(uniform() + 0.5f, static_cast<int>(bits() % 250) - 125) *
            (bits() % 2 != 0 ? 1.f : -1.f);
    }
    x[i] = v;
  }
  if (kind != 14 && kind != 15) return;
  for (const std::uint32_t c : sampled_columns(n, 2048))
    if (c < n) x[c] = kind == 14 ? 100 + gauss(bits) : -inf;
}

struct Shape {
  std::int64_t width, padding, offset;  // elements between rows and before the first
  Ints topks;
};
void PrintTo(const Shape& s, std::ostream* out) { *out << "width " << s.width; }

// Every kind of data times these lengths.
Ints lengths_of(std::int32_t k, std::int32_t width) {
  return {-1, 0, 1, k - 1, k, k + 1, width, width - 1, 6145, 3 * k, width / 2, width, width};
}
constexpr std::int64_t kLengths = 13, kRows = std::ssize(kKinds) * kLengths;

class GpuSelectTopkSweep : public testing::TestWithParam<Shape> {
 protected:
  // All rows of the shape in a dtype, on the host and on the GPU.
  struct Scores {
    Array memory;
    Tensor view;
    Scores(DType dtype, const Shape& shape)
        : memory(dtype, {kRows * (shape.width + shape.padding) + shape.offset}),
          view(memory.view()) {
      view.data = static_cast<char*>(view.data) + shape.offset * dtype_bytes(dtype);
      view.rank = 2;
      view.shape = {kRows, shape.width};
      view.strides = {shape.width + shape.padding, 1};
    }
    Tensor on(const Twin& twin) const {
      Tensor there = view;
      there.device = kGpu;
      there.data = static_cast<char*>(twin.view().data) +
                   (static_cast<char*>(view.data) - static_cast<char*>(memory.view().data));
      return there;
    }
  };

  void SetUp() override { SKIP_WITHOUT_GPU(); }

  static void set_ranges(std::int32_t k, std::int32_t width, const Array& starts,
                         const Array& ends) {
    const Ints lengths = lengths_of(k, width);
    for (std::int32_t i = 0; i < kRows; ++i) {
      const std::int32_t start = i % 3 == 0 ? 0 : i % 3 == 1 ? 17 * i : -5;
      starts.as<std::int32_t>()[i] = start;
      const std::int32_t length = lengths[static_cast<std::size_t>(i % kLengths)];
      // Some ranges are wider than the matrix.
      ends.as<std::int32_t>()[i] = std::max(0, start) + length + (length == width ? i % 7 : 0);
    }
  }

  // All implementations, all rows at once and few at a time, against the CPU.
  static void check(const SelectTopkArgs& host, const SelectTopkArgs& gpu, const char* what) {
    const std::int64_t k = host.topk_indices.shape[1];
    const Outputs want(kRows, k), poison(kRows, k), got(kRows, k);
    SelectTopkArgs args = host;
    want.into(args);
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    args = gpu;
    OutputTwins outputs(poison);
    outputs.into(args);
    for (const std::int64_t batch : {kRows, kClusterRows}) {
      for (const Verdict& v : explain(rows_of(args, 0, batch)).verdicts) {
        if (!v.refusal.empty() || !v.implementation.starts_with("cuda.")) continue;
        const bench::PinGuard pin("select_topk", v.implementation);
        outputs.ids.upload(poison.ids);
        outputs.lengths.upload(poison.lengths);
        outputs.scores.upload(poison.scores);
        for (std::int64_t i = 0; i < kRows; i += batch)
          select_topk(rows_of(args, i, std::min(batch, kRows - i)), {});
        outputs.download(got);
        const std::string wrong = difference(got, want);
        EXPECT_EQ(wrong, "") << what << " k " << k << ", " << v.implementation << ", " << batch
                             << " rows at a time; 13 rows are of a kind";
      }
    }
  }
  static SelectTopkArgs rows_of(SelectTopkArgs a, std::int64_t first, std::int64_t count) {
    for (Tensor* t : {&a.scores, &a.starts, &a.ends, &a.topk_indices, &a.topk_lengths})
      *t = t->rows(first, count);
    if (!a.topk_scores.empty()) a.topk_scores = a.topk_scores.rows(first, count);
    return a;
  }
};

TEST_P(GpuSelectTopkSweep, EqualsTheCpu) {
  const Shape& shape = GetParam();
  const auto width = static_cast<std::int32_t>(shape.width);
  const Scores wide(DType::kF32, shape);
  auto* values = static_cast<float*>(wide.view.data);
  parallel_for(kRows, [&](std::int64_t i, int) {
    fill(static_cast<std::size_t>(i / kLengths), values + i * wide.view.strides[0], width,
         static_cast<std::uint64_t>(1000003 * i + width));
  });
  const Array starts(DType::kI32, {kRows}), ends(DType::kI32, {kRows});
  Twin gpu_starts(starts), gpu_ends(ends);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Scores scores(dtype, shape);
    parallel_for(kRows, [&](std::int64_t i, int) {
      for (std::int64_t c = i * wide.view.strides[0], n = c + width; c < n; ++c) {
        if (dtype == DType::kF32) static_cast<float*>(scores.view.data)[c] = values[c];
        if (dtype == DType::kBF16) static_cast<BF16*>(scores.view.data)[c] = to_bf16(values[c]);
        if (dtype == DType::kF16) static_cast<F16*>(scores.view.data)[c] = to_f16(values[c]);
      }
    });
    const Twin gpu_scores(scores.memory);
    for (const std::int32_t k : shape.topks) {
      set_ranges(k, width, starts, ends);
      gpu_starts.upload(starts);
      gpu_ends.upload(ends);
      const Outputs extents(kRows, k);
      SelectTopkArgs host{scores.view, starts, ends, extents.ids, extents.lengths, extents.scores};
      SelectTopkArgs gpu = host;
      gpu.scores = scores.on(gpu_scores);
      gpu.starts = gpu_starts.view();
      gpu.ends = gpu_ends.view();
      check(host, gpu, dtype_name(dtype));
      if (k != 33 && k != 2048 && k != 4097) continue;
      host.keep_minus_inf = gpu.keep_minus_inf = true;
      check(host, gpu, "keep_minus_inf");
      host.keep_first = gpu.keep_first = k / 3;
      host.keep_last = gpu.keep_last = k / 5;
      check(host, gpu, "keep_minus_inf, keys kept");
      host.keep_minus_inf = gpu.keep_minus_inf = false;
      host.keep_last = gpu.keep_last = k - k / 3;
      check(host, gpu, "k keys kept");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuSelectTopkSweep,
    testing::Values(
        Shape{1, 0, 0, {1, 2048, 4097}}, Shape{777, 2, 1, {1, 2, 31, 32, 33, 2048, 4097}},
        Shape{8192, 0, 0, {2047, 2048, 2049, 4095, 4096, 4097, 65536}},
        Shape{33001, 3, 3, {1, 33, 2047, 2048, 2049, 4095, 4096, 4097}},
        Shape{131072, 0, 0, {1, 2, 31, 32, 33, 2047, 2048, 2049, 4095, 4096, 4097, 65536}},
        Shape{300007, 5, 2, {2048, 4096}}),
    [](const auto& test) { return fmt::format("width{}", test.param.width); });

class GpuSelectTopk : public testing::Test {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  static Array gauss(std::int64_t rows, std::int64_t width, std::uint64_t seed) {
    Array scores(DType::kF32, {rows, width});
    for (std::int64_t i = 0; i < rows; ++i)
      fill(i % 2 == 0 ? 0 : 17, scores.as<float>() + i * width, width,
           seed + 7 * static_cast<std::uint64_t>(i));
    return scores;
  }
  static Outputs on_cpu(SelectTopkArgs args) {
    Outputs want(args.scores.shape[0], args.topk_indices.shape[1]);
    want.into(args);
    Scratch scratch;
    select_topk(args, scratch.get(select_topk_workspace_bytes(args)));
    return want;
  }
};

// Three long rows, among others: what compute-sanitizer has time for.
struct Few {
  std::int64_t rows, width;
};
void PrintTo(const Few& few, std::ostream* out) { *out << few.rows << " x " << few.width; }

class GpuSelectTopkFew : public GpuSelectTopk, public testing::WithParamInterface<Few> {};

TEST_P(GpuSelectTopkFew, EqualTheCpu) {
  const auto [rows, width] = GetParam();
  const Array scores = gauss(rows, width, 5), starts(DType::kI32, {rows}),
              ends(DType::kI32, {rows});
  for (std::int32_t i = 0; i < rows; ++i) {
    const auto length = static_cast<std::int32_t>(width) - 301 * i;
    starts.as<std::int32_t>()[i] = 100 * i;
    ends.as<std::int32_t>()[i] = 100 * i + (i < 3 ? length : i);
  }
  const Twin s(scores), a(starts), b(ends);
  for (const std::int64_t k : {7, 2048, 5000}) {
    const Outputs poison(rows, k), got(rows, k);
    SelectTopkArgs args{scores, starts, ends, poison.ids, poison.lengths, poison.scores};
    args.keep_first = 2;
    const Outputs want = on_cpu(args);
    args.scores = s.view();
    args.starts = a.view();
    args.ends = b.view();
    const OutputTwins outputs(poison);
    outputs.into(args);
    for (const Verdict& v : explain(args).verdicts) {
      if (!v.refusal.empty()) continue;
      const bench::PinGuard pin("select_topk", v.implementation);
      select_topk(args, {});
      outputs.download(got);
      EXPECT_EQ(difference(got, want), "") << v.implementation << " k " << k;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, GpuSelectTopkFew,
                         testing::Values(Few{3, 705}, Few{3, 33001}, Few{3, 140001},
                                         Few{133, 65539}),
                         [](const auto& test) {
                           return fmt::format("n{}x{}", test.param.rows, test.param.width);
                         });

TEST_F(GpuSelectTopk, StridesOfEveryTensor) {
  constexpr std::int64_t kSome = 5, kWidth = 3000;
  for (const std::int64_t k : {100, 2500, 5000}) {
    const Array scores = gauss(kSome, 3 * kWidth, 9), starts(DType::kI32, {kSome, 2}),
                ends(DType::kI32, {kSome, 3});
    for (std::int32_t i = 0; i < kSome; ++i) {
      starts.as<std::int32_t>()[2 * i] = i;
      ends.as<std::int32_t>()[3 * i] = i + kWidth - 10 * i;
    }
    // Slots lie rows apart; the matrix is given by rows, by every third column, and transposed.
    const Array ids(DType::kI32, {k, kSome}), lengths(DType::kI32, {kSome, 4}),
        payload(DType::kF32, {k, kSome});
    auto column = [](Tensor t) {
      t.rank = 1;
      return t;
    };
    auto views = [](const Tensor& t) {
      Tensor thirds = t, across = t;
      thirds.shape[1] = across.shape[1] = kWidth;
      thirds.strides[1] = 3;
      across.strides = {1, kSome};
      return std::array{t.channels(0, kWidth), thirds, across};
    };
    const Twin s(scores), a(starts), b(ends), x(ids), n(lengths), y(payload);
    for (std::size_t view = 0; view < 3; ++view) {
      const Outputs extents(kSome, k), got(kSome, k);
      SelectTopkArgs args{views(scores)[view], column(starts),  column(ends),
                          extents.ids,         extents.lengths, extents.scores};
      const Outputs want = on_cpu(args);
      args.scores = views(s.view())[view];
      args.starts = column(a.view());
      args.ends = column(b.view());
      args.topk_indices = x.view().transposed();
      args.topk_lengths = column(n.view());
      args.topk_scores = y.view().transposed();
      select_topk(args, {});
      synchronise(kGpu);
      x.download(ids);
      n.download(lengths);
      y.download(payload);
      for (std::int64_t i = 0; i < kSome; ++i) {
        got.lengths.as<std::int32_t>()[i] = lengths.as<std::int32_t>()[4 * i];
        for (std::int64_t slot = 0; slot < k; ++slot) {
          got.ids.as<std::int32_t>()[i * k + slot] = ids.as<std::int32_t>()[slot * kSome + i];
          got.scores.as<float>()[i * k + slot] = payload.as<float>()[slot * kSome + i];
        }
      }
      EXPECT_EQ(difference(got, want), "") << "view " << view << " k " << k;
      args.topk_scores = {};
      select_topk(args, {});
      synchronise(kGpu);
    }
  }
}

TEST_F(GpuSelectTopk, RowsFartherApartThan32BitsReach) {
  for (const std::int64_t k : {1, 5000}) {
    const std::int64_t stride = (1ll << 32) + 64;
    const DeviceMemory memory(kGpu, (stride + 64) * 4);
    const float one = 1, zeros[8] = {};
    auto put = [&](std::int64_t at, const float* x, std::int64_t n) {
      copy_to_device(kGpu, static_cast<float*>(memory.data()) + at, x, 4 * n);
    };
    put(0, zeros, 8);
    put(stride, zeros, 8);
    put(3, &one, 1);
    put(stride + 5, &one, 1);
    const Array starts(DType::kI32, {2}), ends(DType::kI32, {2});
    ends.as<std::int32_t>()[0] = ends.as<std::int32_t>()[1] = k == 1 ? 8 : 1;
    const Outputs host(2, k);
    const Twin a(starts), b(ends);
    const OutputTwins outputs(host);
    SelectTopkArgs args;
    args.scores = make_tensor(memory.data(), DType::kF32, {2, 8}, kGpu);
    args.scores.strides[0] = stride;
    args.starts = a.view();
    args.ends = b.view();
    outputs.into(args);
    select_topk(args, {});
    outputs.download(host);
    EXPECT_EQ(host.ids.as<std::int32_t>()[0], k == 1 ? 3 : 0);
    EXPECT_EQ(host.ids.as<std::int32_t>()[k], k == 1 ? 5 : 0);
    EXPECT_EQ(host.lengths.as<std::int32_t>()[1], 1);
  }
}

#if defined(WINNOW_CUDA)
void check_cuda(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// A plateau of zeros as long as a row can be, and three ones.
TEST_F(GpuSelectTopk, TwoToThe31Columns) {
  constexpr std::int64_t kWidth = std::numeric_limits<std::int32_t>::max(), k = 2048;
  const DeviceMemory memory(kGpu, 2 * kWidth);
  check_cuda(cudaMemset(memory.data(), 0, 2 * kWidth));
  const BF16 one = to_bf16(1);
  const Ints high = {1 << 30, std::numeric_limits<std::int32_t>::max() - 100000,
                     std::numeric_limits<std::int32_t>::max() - 1};
  for (const std::int32_t id : high)
    copy_to_device(kGpu, static_cast<BF16*>(memory.data()) + id, &one, 2);
  const Array starts(DType::kI32, {1}), ends(DType::kI32, {1});
  ends.as<std::int32_t>()[0] = std::numeric_limits<std::int32_t>::max();
  const Outputs host(1, k);
  const Twin a(starts), b(ends);
  const OutputTwins outputs(host);
  SelectTopkArgs args;
  args.scores = make_tensor(memory.data(), DType::kBF16, {1, kWidth}, kGpu);
  args.starts = a.view();
  args.ends = b.view();
  outputs.into(args);
  for (const Verdict& v : explain(args).verdicts) {
    if (!v.refusal.empty()) continue;
    const bench::PinGuard pin("select_topk", v.implementation);
    select_topk(args, {});
    outputs.download(host);
    const auto* ids = host.ids.as<std::int32_t>();
    for (std::int32_t s = 0; s < k - 3; ++s) ASSERT_EQ(ids[s], s) << v.implementation;
    EXPECT_EQ(Ints(ids + k - 3, ids + k), high) << v.implementation;
  }
}

// Captured once, replayed with other scores, ranges and lengths in the same memory.
TEST_F(GpuSelectTopk, GraphsReplayWithOtherValues) {
  constexpr std::int64_t kSome = 6, kWidth = 70001;
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream));
  for (const std::int64_t k : {2048, 5000}) {
    const Array starts(DType::kI32, {kSome}), ends(DType::kI32, {kSome});
    const Outputs poison(kSome, k), got(kSome, k);
    Twin s(gauss(kSome, kWidth, 1)), a(starts), b(ends);
    OutputTwins outputs(poison);
    SelectTopkArgs args{s.view(), a.view(), b.view(), {}, {}, {}};
    args.keep_first = 4;
    outputs.into(args);
    for (const Verdict& v : explain(args).verdicts) {
      if (!v.refusal.empty()) continue;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t replay = nullptr;
      {
        const bench::PinGuard pin("select_topk", v.implementation);
        select_topk(args, {nullptr, 0, {stream}});  // the kernel is loaded
        check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        select_topk(args, {nullptr, 0, {stream}});
        check_cuda(cudaStreamEndCapture(stream, &graph));
      }
      check_cuda(cudaGraphInstantiate(&replay, graph, 0));
      for (std::int32_t round = 0; round < 4; ++round) {
        const Array scores = gauss(kSome, kWidth, 100 + static_cast<std::uint64_t>(round));
        for (std::int32_t i = 0; i < kSome; ++i) {
          starts.as<std::int32_t>()[i] = 1000 * round;
          ends.as<std::int32_t>()[i] =
              1000 * round + (i + round) % kSome * (static_cast<std::int32_t>(kWidth) / 5) - 1;
        }
        s.upload(scores);
        a.upload(starts);
        b.upload(ends);
        outputs.ids.upload(poison.ids);
        outputs.lengths.upload(poison.lengths);
        outputs.scores.upload(poison.scores);
        check_cuda(cudaGraphLaunch(replay, stream));
        outputs.download(got);
        SelectTopkArgs host{scores, starts, ends, got.ids, got.lengths, got.scores};
        host.keep_first = 4;
        EXPECT_EQ(difference(got, on_cpu(host)), "") << v.implementation << " round " << round;
      }
      cudaGraphExecDestroy(replay);
      cudaGraphDestroy(graph);
    }
  }
  cudaStreamDestroy(stream);
}
#endif

}  // namespace
}  // namespace winnow
