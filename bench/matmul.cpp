// Problems of nn::matmul.
#include "nn/matmul.h"

#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/operations.h"
#include "ref/reader.h"

namespace winnow::bench {
namespace {

class MatmulCase : public Case {
 public:
  explicit MatmulCase(const Problem& p)
      : m_(p.number("m")), n_(p.number("n")), k_(p.number("k")), accumulate_(p.flag("accumulate")) {
    const std::string& layout = p.word("layout");
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    auto operand = [&](Guarded& memory, bool transposed, std::int64_t rows, std::int64_t columns) {
      memory =
          transposed ? Guarded(p.dtype(), {columns, rows}) : Guarded(p.dtype(), {rows, columns});
      fill_gauss(memory, random);
      return transposed ? memory.view().transposed() : memory.view();
    };
    a_ = operand(a_memory_, layout[0] == 't', m_, k_);
    b_ = operand(b_memory_, layout[1] == 't', k_, n_);
    c_ = Guarded(p.dtype(), {m_, n_});
  }

  Explanation explain() const override { return nn::explain_matmul(a_, b_, c_, accumulate_); }
  // The function keeps this itself, so what the caller lends is not touched.
  std::int64_t workspace_bytes() const override {
    return nn::matmul_scratch_bytes(a_, b_, c_, accumulate_);
  }
  bool keeps_own_memory() const override { return true; }
  TensorBytes tensor_bytes() const override {
    const std::int64_t size = dtype_bytes(c_.view().dtype), c = c_.view().elements();
    return {(a_.elements() + b_.elements() + (accumulate_ ? c : 0)) * size, c * size};
  }
  // C's first content is set here, where it counts.
  void run(Workspace) override {
    for (std::int64_t i = 0; accumulate_ && i < m_; ++i) {
      for (std::int64_t j = 0; j < n_; ++j) ref::set(c_, i, j, before(i, j));
    }
    nn::matmul(a_, b_, c_, accumulate_);
  }
  std::vector<Tensor> outputs() const override { return {c_}; }

  std::vector<Comparison> compare() override {
    Worst worst("c");
    // k products and k sums: every term passes at most k + 1 roundings; C's first content one more.
    const double relative =
        c_.view().dtype == DType::kF64 ? 1e-12 : gamma(static_cast<double>(k_ + 2));
    for (std::int64_t i = 0; i < m_; ++i) {
      for (std::int64_t j = 0; j < n_; ++j) {
        double truth = before(i, j), magnitude = std::abs(truth);
        for (std::int64_t k = 0; k < k_; ++k) {
          const double term = ref::get(a_, i, k) * ref::get(b_, k, j);
          truth += term;
          magnitude += std::abs(term);
        }
        worst.add(ref::get(c_, i, j), truth, relative * magnitude,
                  [&] { return fmt::format("row {} column {}", i, j); });
      }
    }
    return {worst.comparison()};
  }

  Cost cost() const override {
    const auto m = static_cast<double>(m_), n = static_cast<double>(n_),
               k = static_cast<double>(k_);
    const auto size = static_cast<double>(dtype_bytes(c_.view().dtype));
    return {2 * m * n * k, size * (m * k + k * n + m * n * (accumulate_ ? 2 : 1))};
  }

 private:
  double before(std::int64_t i, std::int64_t j) const {
    return accumulate_ ? 0.25 * static_cast<double>((i * 7 + j * 3) % 9 - 4) : 0;
  }

  std::int64_t m_, n_, k_;
  bool accumulate_;
  Guarded a_memory_, b_memory_, c_;
  Tensor a_, b_;
};

}  // namespace

Operation matmul_operation() {
  return {
      "matmul",
      "matrix product of linear layers, C = A . B",
      {{"m", "512", "rows of A and C"},
       {"n", "512", "columns of B and C"},
       {"k", "512", "columns of A, rows of B"},
       {"layout", "nt", "t where A, B is a transposed view", words({"nn", "nt", "tn", "tt"})},
       {"accumulate", "0", "1: C += A . B", kFlag},
       {"dtype", "f32", "", words({"f64", "f32"})},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<MatmulCase>(p); },
      {"matmul m=37 n=45 k=70", "matmul m=40 n=33 k=530 layout=nn accumulate=1",
       "matmul m=50 n=70 k=40 layout=tn accumulate=1", "matmul m=35 n=17 k=9 layout=tt",
       "matmul m=250 n=270 k=20 layout=nn", "matmul m=5 n=210 k=33", "matmul m=24 n=100 k=65",
       "matmul m=7 n=40 k=33 layout=nn", "matmul m=1 n=97 k=100", "matmul m=9 n=8 k=7 dtype=f64",
       "matmul m=0 n=5 k=4", "matmul m=3 n=5 k=0"},
      {"matmul", "matmul layout=nn", "matmul layout=tn accumulate=1", "matmul m=2048 n=768 k=256",
       "matmul m=2048 n=256 k=768", "matmul m=16 n=2048 k=2048", "matmul m=1 n=2048 k=2048"}};
}

}  // namespace winnow::bench
