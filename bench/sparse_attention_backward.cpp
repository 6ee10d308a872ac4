// Problems of sparse_attention_backward.
#include "winnow/sparse_attention_backward.h"

#include <cmath>

#include "base/array.h"
#include "bench/attention.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "ref/reader.h"
#include "winnow/sparse_attention.h"

namespace winnow::bench {
namespace {

constexpr double kTiny = 0x1p-149;

// A value with the bound on its error, accumulated in double.
struct Bounded {
  double truth = 0, error = 0, magnitude = 0, terms = 0;
  // Adds a product a * b, of which a carries an error of its own.
  void add(double a, double a_error, double b) {
    truth += a * b;
    error += a_error * std::abs(b);
    magnitude += std::abs(a * b);
    terms += 1;
  }
};

class SparseAttentionBackwardCase
    : public OperationCase<sparse_attention_backward, sparse_attention_backward_workspace_bytes> {
 public:
  explicit SparseAttentionBackwardCase(const Problem& p) : in_(p) {
    const DType wide = in_.wide(), out = p.flag("wide") ? wide : in_.dtype;
    output_ = Guarded(out, {in_.rows, in_.heads, in_.dim_v});
    lse_ = Guarded(wide, {in_.rows, in_.heads});
    d_output_ = Guarded(out, {in_.rows, in_.heads, in_.dim_v});
    d_query_ = Guarded(wide, {in_.rows, in_.heads, in_.dim_qk});
    d_key_ = Guarded(wide, {in_.keys, in_.kv_heads, in_.dim_qk});
    if (!in_.shared_value) d_value_ = Guarded(wide, {in_.keys, in_.kv_heads, in_.dim_v});
    Random random(static_cast<std::uint64_t>(p.number("seed")) + 100);
    fill_gauss(d_output_, random);
    if (!ShapesOnly::on()) fill_forward();
    args_ = {in_.query,
             in_.key.data(),
             in_.value_or_nothing(),
             in_.indices_or_nothing(),
             in_.lengths_or_nothing(),
             in_.starts,
             in_.ends,
             in_.softmax_scale,
             output_,
             lse_,
             d_output_,
             d_query_,
             d_key_,
             in_.shared_value ? Tensor{} : d_value_.view()};
  }

  std::vector<Tensor> outputs() const override {
    if (in_.shared_value) return {d_query_, d_key_};
    return {d_query_, d_key_, d_value_};
  }

  // Bounds, u the unit roundoff, all from the lse that is given:
  //   p = exp(z - lse)         relative: delta = error of z + u |z - lse| + 2u for exp
  //   dp = d_output . value    dim_v terms: alpha = gamma(dim_v + 1) |d_output| . |value|
  //   delta_h = sum p dp       eta = sum p (|dp| (delta + gamma(slots + 1)) + alpha)
  //   dz = p (dp - delta_h)    zeta = p (|dp - delta_h| (delta + 3u) + alpha + eta)
  // The third rounding of dz is the product with the scale. A gradient is a sum of n products with
  // dz or p: the errors of these times the other factor, and gamma(n + 2) of the magnitudes. A
  // rounding among the subnormals is off by up to tiny = 2^-149, whatever the size: one for each of
  // the two products of dz, the first times the scale, and one per term of a sum.
  // On GPUs matrix units truncate (product_gamma), and with bf16 p, dz and a d_output in f32 are
  // rounded to bf16 before they are multiplied; and where d_key holds both gradients, what a row adds
  // to a key is rounded to f16 times a power of two, 2^k with 2^14 <= 2^k bound < 2^15: by up to 2^-11
  // of it or, among f16's subnormals, by 2^-25 2^-k <= 2^-39 bound. The bound of a row: the contract;
  // a thousandth of it for the roundings of its sum.
  std::vector<Comparison> compare() override {
    Worst d_query("d_query"), d_key("d_key"), d_value("d_value");
    const auto key_size = static_cast<std::size_t>(in_.keys * in_.kv_heads);
    std::vector<Bounded> key_sums(key_size * static_cast<std::size_t>(in_.dim_qk));
    std::vector<Bounded> value_sums(key_size * static_cast<std::size_t>(in_.dim_v));
    const Tensor& value = in_.value_source();
    const double unit = gamma_of(in_.dtype, 1);
    const bool rounds = current_device().kind == Device::Kind::kCuda && in_.dtype == DType::kBF16;
    auto rounding = [&](double x) { return rounds ? storage_error(DType::kBF16, std::abs(x)) : 0; };
    const bool rounds_output = d_output_.view().dtype != in_.dtype;
    const bool rounds_rows = rounds && in_.shared_value;
    for (std::int64_t i = 0; i < in_.rows; ++i) {
      const std::vector<std::int64_t> slots = in_.slots(i);
      const std::size_t count = slots.size();
      double row_bound = 0;
      for (std::int64_t h = 0; h < in_.heads; ++h) {
        const std::int64_t g = h / in_.group();
        const HeadLogits head = head_logits(in_, i, h, slots);
        const double lse = ref::get(lse_, i, h);
        std::vector<double> p(count), p_error(count), dp(count), dp_error(count);
        double delta = 0, delta_error = 0;
        for (std::size_t s = 0; s < count; ++s) {
          p[s] = std::exp(head.z[s] - lse);
          p_error[s] = p[s] * (head.error[s] + unit * (std::abs(head.z[s] - lse) + 2)) + 0x1p-148;
          double magnitude = 0;
          for (std::int64_t c = 0; c < in_.dim_v; ++c) {
            const double d = ref::get(d_output_, i, h, c), v = ref::get(value, slots[s], g, c);
            dp[s] += d * v;
            magnitude += std::abs(d * v);
            if (rounds_output) dp_error[s] += rounding(d) * std::abs(v);
          }
          dp_error[s] += product_gamma(in_.dtype, static_cast<double>(in_.dim_v + 1)) *
                         (magnitude + dp_error[s]);
          delta += p[s] * dp[s];
          delta_error +=
              std::abs(dp[s]) *
                  (p_error[s] + p[s] * gamma_of(in_.dtype, static_cast<double>(count + 1))) +
              p[s] * dp_error[s];
        }
        double top_p = 0, top_dp = 0, top_query = 0, top_output = 0;
        for (std::size_t s = 0; s < count; ++s) {
          top_p = std::max(top_p, p[s] + p_error[s]);
          top_dp = std::max(top_dp, std::abs(dp[s]) + dp_error[s]);
        }
        for (std::int64_t d = 0; d < in_.dim_qk; ++d)
          top_query = std::max(top_query, std::abs(ref::get(in_.query, i, h, d)));
        for (std::int64_t c = 0; c < in_.dim_v; ++c)
          top_output = std::max(top_output, std::abs(ref::get(d_output_, i, h, c)));
        row_bound +=
            top_p *
            (in_.softmax_scale * (top_dp + std::abs(delta) + delta_error) * top_query + top_output);
        std::vector<Bounded> query_sums(static_cast<std::size_t>(in_.dim_qk));
        for (std::size_t s = 0; s < count; ++s) {
          const double difference = dp[s] - delta, dz = in_.softmax_scale * p[s] * difference;
          double dz_error =
              in_.softmax_scale * (std::abs(difference) * (p_error[s] + 3 * unit * p[s]) +
                                   p[s] * (dp_error[s] + delta_error) + kTiny) +
              kTiny;
          dz_error += rounding(std::abs(dz) + dz_error);
          const double weight_error = p_error[s] + rounding(p[s] + p_error[s]);
          const std::int64_t row = slots[s] * in_.kv_heads + g;
          for (std::int64_t d = 0; d < in_.dim_qk; ++d) {
            query_sums[static_cast<std::size_t>(d)].add(dz, dz_error,
                                                        ref::get(in_.key.data(), slots[s], g, d));
            key_sums[static_cast<std::size_t>(row * in_.dim_qk + d)].add(
                dz, dz_error, ref::get(in_.query, i, h, d));
          }
          for (std::int64_t c = 0; c < in_.dim_v; ++c) {
            Bounded& sum = in_.shared_value
                               ? key_sums[static_cast<std::size_t>(row * in_.dim_qk + c)]
                               : value_sums[static_cast<std::size_t>(row * in_.dim_v + c)];
            const double d = ref::get(d_output_, i, h, c);
            sum.add(p[s], weight_error, d);
            if (rounds_output) sum.error += (p[s] + weight_error) * rounding(d);
          }
        }
        for (std::int64_t d = 0; d < in_.dim_qk; ++d) {
          add(d_query, d_query_, (i * in_.heads + h) * in_.dim_qk + d,
              query_sums[static_cast<std::size_t>(d)]);
        }
      }
      const auto channels = static_cast<std::size_t>(in_.dim_qk * in_.kv_heads);
      for (std::size_t s = 0; rounds_rows && s < count; ++s) {
        for (std::size_t c = 0; c < channels; ++c) {
          key_sums[static_cast<std::size_t>(slots[s]) * channels + c].error +=
              0x1p-39 * 1.001 * row_bound;
        }
      }
    }
    for (Bounded& sum : key_sums)
      if (rounds_rows) sum.error += 0x1p-11 * (sum.magnitude + sum.error);
    for (std::size_t e = 0; e < key_sums.size(); ++e)
      add(d_key, d_key_, static_cast<std::int64_t>(e), key_sums[e]);
    if (in_.shared_value) return {d_query.comparison(), d_key.comparison()};
    for (std::size_t e = 0; e < value_sums.size(); ++e)
      add(d_value, d_value_, static_cast<std::int64_t>(e), value_sums[e]);
    return {d_query.comparison(), d_key.comparison(), d_value.comparison()};
  }

  Cost cost() const override {
    const double flops =
        2 * in_.pairs() * static_cast<double>(in_.heads * (3 * in_.dim_qk + 2 * in_.dim_v));
    const Tensor& d_output = d_output_;
    const auto wide = static_cast<double>(dtype_bytes(in_.wide()));
    return {flops, in_.input_elements() * (static_cast<double>(dtype_bytes(in_.dtype)) + wide) +
                       static_cast<double>(2 * d_output.elements() * dtype_bytes(d_output.dtype))};
  }

 private:
  // The forward that the caller has run before; whatever its lse, the gradients are exact for it.
  void fill_forward() {
    const SparseAttentionArgs forward = {in_.query,
                                         in_.key.data(),
                                         in_.value_or_nothing(),
                                         in_.indices_or_nothing(),
                                         in_.lengths_or_nothing(),
                                         in_.starts,
                                         in_.ends,
                                         in_.softmax_scale,
                                         output_,
                                         lse_};
    Scratch scratch;
    sparse_attention(forward, scratch.get(sparse_attention_workspace_bytes(forward)));
  }

  void add(Worst& worst, const Tensor& t, std::int64_t element, const Bounded& sum) const {
    const double bound = sum.error +
                         product_gamma(in_.dtype, sum.terms + 2) * (sum.magnitude + sum.error) +
                         kTiny * sum.terms;
    worst.add(load_double(t.data, t.dtype, element), sum.truth, bound,
              [&] { return fmt::format("element {}", element); });
  }

  AttentionInputs in_;
  Guarded output_, lse_, d_output_, d_query_, d_key_, d_value_;
};

}  // namespace

Operation sparse_attention_backward_operation() {
  return {
      "sparse_attention_backward",
      "gradients of sparse_attention",
      attention_parameters(),
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<SparseAttentionBackwardCase>(p);
      },
      {"sparse_attention_backward rows=3 keys=120 heads=20 topk=70",
       "sparse_attention_backward rows=5 keys=200 heads=16 dim_qk=96 dim_v=80 topk=150 dtype=bf16 "
       "ids=scattered",
       "sparse_attention_backward rows=24 keys=150 heads=3 dim_qk=17 dim_v=13 topk=40 "
       "range=awkward ids=scattered",
       "sparse_attention_backward rows=24 keys=150 heads=3 dim_qk=17 dim_v=13 topk=0 "
       "range=awkward",
       "sparse_attention_backward rows=26 keys=160 heads=6 kv_heads=2 dim_qk=24 dim_v=40 value=1 "
       "topk=70 ids=scattered lengths=1 range=awkward dtype=f16",
       "sparse_attention_backward rows=90 keys=90 heads=4 dim_qk=80 dim_v=64 topk=0 range=packed",
       "sparse_attention_backward rows=90 keys=90 heads=4 dim_qk=80 dim_v=64 topk=16 range=packed "
       "ids=popular lengths=1",
       "sparse_attention_backward rows=70 keys=200 heads=4 kv_heads=4 dim_qk=33 dim_v=31 value=1 "
       "topk=0 range=causal dtype=bf16 wide=1",
       "sparse_attention_backward rows=9 keys=140 heads=5 dim_qk=8 dim_v=1 topk=0 spread=40",
       "sparse_attention_backward rows=20 keys=100 heads=7 kv_heads=7 dim_qk=1 dim_v=5 value=1 "
       "topk=100 ids=scattered spread=20",
       "sparse_attention_backward rows=12 keys=80 heads=8 kv_heads=2 dim_qk=16 dim_v=16 topk=20 "
       "ids=scattered dtype=f64 lengths=1 range=causal",
       "sparse_attention_backward rows=8 keys=50 heads=2 dim_qk=12 dim_v=9 topk=0 dtype=f64 "
       "range=awkward",
       "sparse_attention_backward rows=2 keys=60 heads=7 dim_qk=512 topk=33 dtype=bf16 wide=1",
       "sparse_attention_backward rows=2100 keys=50 heads=1 dim_qk=4 dim_v=3 topk=3 ids=popular",
       "sparse_attention_backward rows=5 keys=63 heads=8 kv_heads=8 dim_qk=12 dim_v=9 topk=64 "
       "lengths=1 spread=80",
       "sparse_attention_backward rows=3 keys=90 heads=3 kv_heads=3 dim_qk=192 dim_v=128 value=1 "
       "topk=50 dtype=bf16",
       "sparse_attention_backward rows=9 keys=170 heads=16 topk=70 ids=scattered lengths=1 "
       "range=awkward dtype=bf16",
       "sparse_attention_backward rows=3 keys=150 heads=64 dim_qk=512 topk=130 dtype=bf16 wide=1",
       "sparse_attention_backward rows=2 keys=100 heads=100 topk=80 ids=scattered dtype=bf16",
       "sparse_attention_backward rows=300 keys=40 heads=1 topk=3 ids=popular dtype=bf16",
       "sparse_attention_backward rows=3 keys=90 heads=33 dim_qk=512 topk=0 range=causal "
       "dtype=bf16",
       "sparse_attention_backward rows=4 keys=200 heads=8 topk=150 spread=60 dtype=bf16",
       "sparse_attention_backward rows=1100 keys=40 heads=1 topk=2048 dtype=bf16",
       "sparse_attention_backward rows=0 keys=64 heads=4 dtype=bf16",
       "sparse_attention_backward rows=0 keys=64 heads=4 dim_qk=16 dim_v=16 topk=8",
       "sparse_attention_backward rows=0 keys=64 heads=4 dim_qk=16 dim_v=16 topk=0",
       "sparse_attention_backward rows=3 keys=0 heads=4 dim_qk=16 dim_v=16 topk=8",
       "sparse_attention_backward rows=3 keys=0 heads=4 dim_qk=16 dim_v=16 topk=0"},
      {"sparse_attention_backward rows=16 keys=16384",
       "sparse_attention_backward rows=16 keys=16384 dtype=bf16",
       "sparse_attention_backward rows=32 keys=4096 topk=0",
       "sparse_attention_backward rows=2048 keys=2048 heads=4 dim_qk=80 dim_v=64 topk=128 "
       "range=packed",
       "sparse_attention_backward rows=2048 keys=2048 heads=4 dim_qk=80 dim_v=64 topk=0 "
       "range=packed"}};
}

}  // namespace winnow::bench
