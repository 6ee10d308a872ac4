#include "nn/matmul.h"

#include <algorithm>

#include "base/arithmetic.h"
#include "base/run_first.h"
#include "cpu/matmul.h"
#include "nn/rows.h"
#include "ops/lists.h"

namespace winnow::nn {
namespace {

// The reference: any strides, sums in double, one rounding at the end.
template <class T>
void multiply_rows(const MatmulArgs& args, std::int64_t i) {
  constexpr std::int64_t kBlock = 64;
  const Tensor &a = args.a, &b = args.b, &c = args.c;
  const std::int64_t depth = a.shape[1], width = c.shape[1];
  for (std::int64_t first = 0; first < width; first += kBlock) {
    const std::int64_t columns = std::min(kBlock, width - first);
    double sums[kBlock] = {};
    T* out = c.as<T>() + i * c.strides[0] + first * c.strides[1];
    for (std::int64_t j = 0; args.accumulate && j < columns; ++j) {
      sums[j] = static_cast<double>(out[j * c.strides[1]]);
    }
    for (std::int64_t k = 0; k < depth; ++k) {
      const double x = a.as<T>()[i * a.strides[0] + k * a.strides[1]];
      const T* y = b.as<T>() + k * b.strides[0] + first * b.strides[1];
      for (std::int64_t j = 0; j < columns; ++j) {
        sums[j] += x * static_cast<double>(y[j * b.strides[1]]);
      }
    }
    for (std::int64_t j = 0; j < columns; ++j) out[j * c.strides[1]] = static_cast<T>(sums[j]);
  }
}

const Implementation<MatmulArgs> reference = {
    "reference", [](const MatmulArgs&) { return Refusal(); },
    [](const MatmulArgs&) { return std::int64_t{0}; },
    [](const MatmulArgs& args, Workspace) {
      with_real(args.a.dtype, [&]<class T>(T) {
        parallel_for(args.c.shape[0], [&](std::int64_t i, int) { multiply_rows<T>(args, i); });
      });
    }};

constexpr char kName[] = "matmul";
constexpr const Implementation<MatmulArgs>* kList[] = {WINNOW_CPU_IMPLEMENTATIONS(matmul) &
                                                       reference};

// Views may lie between one another's rows (one head of many), so byte ranges decide nothing here;
// a common first element does.
void check_apart(const Tensor& c, const char* name, const Tensor& t) {
  WINNOW_CHECK(kName, c.data != t.data || c.elements() == 0 || t.elements() == 0 || !c.data,
               "c must not share memory with {}, but they begin together", name);
}

void check(const MatmulArgs& args) {
  for (const auto& [name, t] :
       {std::pair{"a", &args.a}, std::pair{"b", &args.b}, std::pair{"c", &args.c}})
    check_host(kName, name, *t);
  check_real(kName, "a", args.a);
  check_shape(kName, "a", args.a, {-1, -1}, "[M, K]");
  check_shape(kName, "b", args.b, {args.a.shape[1], -1}, "[K, N]");
  check_shape(kName, "c", args.c, {args.a.shape[0], args.b.shape[1]}, "[M, N]");
  check_dtypes(kName, "b", args.b, "a", args.a);
  check_dtypes(kName, "c", args.c, "a", args.a);
  check_apart(args.c, "a", args.a);
  check_apart(args.c, "b", args.b);
}

}  // namespace

void matmul(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  static thread_local Scratch scratch;  // grows to the largest call of this thread
  const MatmulArgs args{a, b, c, accumulate};
  check(args);
  counted_flops() += 2 * static_cast<double>(a.shape[0]) * static_cast<double>(a.shape[1]) *
                     static_cast<double>(b.shape[1]);
  run_first(kName, kList, Device{}, args,
            scratch.get(workspace_bytes_of(kName, kList, Device{}, args)));
}

Explanation explain_matmul(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate) {
  const MatmulArgs args{a, b, c, accumulate};
  check(args);
  return explain_call(kName, kList, Device{}, args);
}

std::int64_t matmul_scratch_bytes(const Tensor& a, const Tensor& b, const Tensor& c,
                                  bool accumulate) {
  const MatmulArgs args{a, b, c, accumulate};
  check(args);
  return workspace_bytes_of(kName, kList, Device{}, args);
}

void linear(const Tensor& x, const Tensor& weight, const Tensor& y) {
  check_shape("linear", "weight", weight, {-1, -1}, "[out, in]");
  matmul(as_rows("linear", "x", x), weight.transposed(), as_rows("linear", "y", y));
}

void linear_backward(const Tensor& x, const Tensor& weight, const Tensor& d_y, const Tensor& d_x,
                     const Tensor& d_weight, bool accumulate_x) {
  constexpr char kLinear[] = "linear_backward";
  const Tensor d = as_rows(kLinear, "d_y", d_y);
  if (!d_x.empty()) matmul(d, weight, as_rows(kLinear, "d_x", d_x), accumulate_x);
  if (!d_weight.empty()) matmul(d.transposed(), as_rows(kLinear, "x", x), d_weight, true);
}

}  // namespace winnow::nn
