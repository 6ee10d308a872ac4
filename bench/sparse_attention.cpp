// Problems of sparse_attention.
#include "winnow/sparse_attention.h"

#include <cmath>

#include "bench/attention.h"
#include "bench/bounds.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "ref/reader.h"

namespace winnow::bench {
namespace {

class SparseAttentionCase
    : public OperationCase<sparse_attention, sparse_attention_workspace_bytes> {
 public:
  explicit SparseAttentionCase(const Problem& p) : in_(p, p.number("page")) {
    output_ = Guarded(p.flag("wide") ? in_.wide() : in_.dtype, {in_.rows, in_.heads, in_.dim_v});
    lse_ = Guarded(in_.wide(), {in_.rows, in_.heads});
    args_ = {in_.query,
             in_.key.view(),
             in_.value_or_nothing(),
             in_.indices_or_nothing(),
             in_.lengths_or_nothing(),
             in_.starts,
             in_.ends,
             in_.softmax_scale,
             output_,
             lse_};
  }

  std::vector<Tensor> outputs() const override { return {output_, lse_}; }

  // Bounds. Let w_s = exp(z_s - m), m the largest logit, p_s = w_s / sum w. A common factor of all
  // w cancels, so an error of m does not count. Of w_s counts, relative to itself:
  //   delta_s = error of z_s + u |z_s - m| (rounded differences, over all rescalings together)
  //             + 3u per block for its factor exp(m_old - m_new) and the product with it: blocks
  //               of 64 on CPUs, where the factors within a span of 512 and its merge into the
  //               spans before are no more, and of 32 on GPUs
  //             + 2u for exp itself (GPUs 3u: ex2.approx is good to 2^-22.5 by its
  //             manual, and to 2^-22.7 over all floats on an H200).
  // The sum adds 8 + 3 roundings inside a block and one per block, the product with the value one
  // per slot and block. exp below 2^-149 (GPUs 2^-126) is lost: at most that, absolutely. Matrix units truncate
  // (product_gamma) and take weights in the dtype of the inputs: storage_error of w_s; sum w is 1 at
  // least.
  std::vector<Comparison> compare() override {
    Worst outputs("output"), lses("lse");
    const bool gpu = current_device().kind == Device::Kind::kCuda;
    const double block = gpu ? 32 : 64, exp_units = gpu ? 3 : 2, lost = gpu ? 0x1p-125 : 0x1p-148;
    for (std::int64_t i = 0; i < in_.rows; ++i) {
      const std::vector<std::int64_t> slots = in_.slots(i);
      const auto count = static_cast<double>(slots.size()), blocks = std::ceil(count / block);
      for (std::int64_t h = 0; h < in_.heads; ++h) {
        const HeadLogits head = head_logits(in_, i, h, slots);
        std::vector<double> p(slots.size()), delta(slots.size());
        double mean_delta = 0, maximum = -INFINITY;
        for (const double z : head.z) maximum = std::max(maximum, z);
        for (std::size_t s = 0; s < slots.size(); ++s) {
          p[s] = std::exp(head.z[s] - head.lse);
          delta[s] =
              head.error[s] + gamma_of(in_.dtype, maximum - head.z[s] + 3 * blocks + exp_units);
          mean_delta += p[s] * delta[s];
        }
        const double sum_error = mean_delta + gamma_of(in_.dtype, 11 + blocks);
        // The logarithm: 2u of itself, then the sum with m.
        lses.add(
            ref::get(lse_, i, h), head.lse,
            sum_error + gamma_of(in_.dtype, 2 * std::abs(head.lse - maximum) + std::abs(head.lse)),
            [&] { return fmt::format("row {} head {}", i, h); });
        for (std::int64_t c = 0; c < in_.dim_v; ++c) {
          double truth = 0, bound = 0;
          for (std::size_t s = 0; s < slots.size(); ++s) {
            const double v = in_.value_at(i, slots[s], h / in_.group(), c);
            truth += p[s] * v;
            bound +=
                std::abs(v) * (p[s] * (delta[s] + product_gamma(in_.dtype, count + blocks + 1)) +
                               lost + (gpu ? storage_error(in_.dtype, p[s]) : 0));
          }
          bound += std::abs(truth) * (sum_error + gamma_of(in_.dtype, 3));
          bound += storage_error(output_.view().dtype, std::abs(truth) + bound);
          outputs.add(ref::get(output_, i, h, c), truth, bound,
                      [&] { return fmt::format("row {} head {} channel {}", i, h, c); });
        }
      }
    }
    return {outputs.comparison(), lses.comparison()};
  }

  Cost cost() const override {
    const double flops =
        2 * in_.pairs() * static_cast<double>(in_.heads * (in_.dim_qk + in_.dim_v));
    const double bytes =
        in_.input_elements() * static_cast<double>(dtype_bytes(in_.dtype)) +
        static_cast<double>(output_.view().elements() * dtype_bytes(output_.view().dtype));
    return {flops, bytes};
  }

 private:
  AttentionInputs in_;
  Guarded output_, lse_;
};

}  // namespace

Operation sparse_attention_operation() {
  const auto parameters = [] {
    std::vector<Parameter> all = attention_parameters();
    all.push_back({"page", "0", "keys of a page, three requests; 0: keys in one piece"});
    return all;
  };
  return {
      "sparse_attention",
      "attention of every row over its selected keys",
      parameters(),
      [](const Problem& p) -> std::unique_ptr<Case> {
        return std::make_unique<SparseAttentionCase>(p);
      },
      {"sparse_attention rows=3 keys=200 heads=64 topk=130",
       "sparse_attention rows=3 keys=300 heads=16 topk=200 dtype=bf16 ids=scattered",
       "sparse_attention rows=24 keys=150 heads=3 dim_qk=17 dim_v=13 topk=40 range=awkward "
       "ids=scattered",
       "sparse_attention rows=24 keys=150 heads=3 dim_qk=17 dim_v=13 topk=0 range=awkward",
       "sparse_attention rows=26 keys=160 heads=6 kv_heads=2 dim_qk=24 dim_v=40 value=1 "
       "topk=70 ids=scattered lengths=1 range=awkward dtype=f16",
       "sparse_attention rows=90 keys=90 heads=4 dim_qk=80 dim_v=64 topk=0 range=packed",
       "sparse_attention rows=90 keys=90 heads=4 dim_qk=80 dim_v=64 topk=16 range=packed "
       "lengths=1",
       "sparse_attention rows=70 keys=200 heads=4 kv_heads=4 dim_qk=33 dim_v=31 value=1 "
       "topk=0 range=causal dtype=bf16 wide=1",
       "sparse_attention rows=9 keys=140 heads=5 dim_qk=8 dim_v=1 topk=0 range=full spread=40",
       "sparse_attention rows=20 keys=100 heads=7 kv_heads=7 dim_qk=1 dim_v=5 value=1 "
       "topk=100 ids=scattered spread=20",
       "sparse_attention rows=12 keys=80 heads=8 kv_heads=2 dim_qk=16 dim_v=16 topk=20 "
       "ids=scattered dtype=f64 lengths=1 range=causal",
       "sparse_attention rows=8 keys=50 heads=2 dim_qk=12 dim_v=9 topk=0 dtype=f64 "
       "range=awkward",
       "sparse_attention rows=2 keys=60 heads=7 dim_qk=512 topk=33 dtype=bf16",
       "sparse_attention rows=3 keys=90 heads=3 kv_heads=3 dim_qk=192 dim_v=128 value=1 "
       "topk=50 dtype=bf16",
       "sparse_attention rows=24 keys=150 heads=3 dim_qk=17 dim_v=13 topk=40 range=awkward "
       "ids=scattered page=16",
       "sparse_attention rows=35 keys=160 heads=6 kv_heads=2 dim_qk=24 dim_v=40 value=1 "
       "topk=70 ids=scattered lengths=1 range=causal dtype=bf16 page=7",
       "sparse_attention rows=24 keys=100 heads=3 dim_qk=17 dim_v=13 topk=0 range=awkward "
       "page=64 dtype=f16",
       "sparse_attention rows=19 keys=60 heads=4 kv_heads=2 dim_qk=8 dim_v=8 value=1 topk=0 "
       "range=causal page=1",
       "sparse_attention rows=12 keys=80 heads=2 dim_qk=16 dim_v=16 topk=20 dtype=f64 page=5",
       "sparse_attention rows=12 keys=150 heads=64 topk=100 ids=scattered lengths=1 range=awkward "
       "dtype=bf16 page=16",
       "sparse_attention rows=2 keys=150 heads=128 topk=130 ids=scattered dtype=bf16 page=64",
       "sparse_attention rows=3 keys=200 heads=70 dim_qk=512 topk=0 range=causal spread=30 "
       "dtype=bf16 wide=1",
       "sparse_attention rows=0 keys=64 heads=4 dim_qk=16 dim_v=16 topk=8",
       "sparse_attention rows=0 keys=64 heads=4 dim_qk=16 dim_v=16 topk=0",
       "sparse_attention rows=3 keys=0 heads=4 dim_qk=16 dim_v=16 topk=8",
       "sparse_attention rows=3 keys=0 heads=4 dim_qk=16 dim_v=16 topk=0"},
      {"sparse_attention rows=16 keys=16384", "sparse_attention rows=16 keys=16384 dtype=bf16",
       "sparse_attention rows=16 keys=16384 dtype=bf16 page=64",
       "sparse_attention rows=1 keys=16384 dtype=bf16", "sparse_attention rows=32 keys=4096 topk=0",
       "sparse_attention rows=2048 keys=2048 heads=4 dim_qk=80 dim_v=64 topk=128 range=packed",
       "sparse_attention rows=2048 keys=2048 heads=4 dim_qk=80 dim_v=64 topk=0 range=packed"}};
}

}  // namespace winnow::bench
