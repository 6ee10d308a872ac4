// Golden vectors of ops/: index scores, selections, sparse attention (MLA and MHA) and the indexer
// losses of one layer, with gradients; [s, b, ...] float32, causal or packed, one file per case.
//
// Each operation gets the golden inputs, so that errors do not pile up; what golden files do not
// hold (lse, targets, scores of a selection) comes from the operations before it.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/winnow/golden.h"
#include "base/array.h"
#include "base/row_range.h"
#include "bench/bounds.h"
#include "model/safetensors.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/layout.h"
#include "winnow/select_topk.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::app {
namespace {

using bench::gamma;
using bench::kUnit;

// What a double computation leaves between itself and the golden float32 numbers: the L2 norm of
// the difference over that of the tensor. No element differs by more than this share of the norm.
constexpr double kGoldenError = 4e-7;

class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path) : file_(path) {
    topk = meta("topk").get<std::int64_t>();
    value_dim = meta("value_dim").get<std::int64_t>();
    relu = meta("relu").get<bool>();
    softmax_scale = meta("softmax_scale").get<double>();
    const Array query = file_.read("index_query");
    rule(query.view().rank == 4, "index_query must be [s, b, heads, dim]", query);
    length = query.view().shape[0];
    batch = query.view().shape[1];
  }

  // Batch element e of a tensor [s, b, ...] as [s, ...].
  Array take(const std::string& name, std::int64_t e, DType dtype) const {
    const Array whole = file_.read(name);
    const Tensor& t = whole;
    rule((t.rank == 3 || t.rank == 4) && is_float(t.dtype) && t.shape[0] == length &&
             t.shape[1] == batch,
         name + " must be floating, [s, b, ...]", t);
    Array out = t.rank == 3 ? Array(dtype, {length, t.shape[2]})
                            : Array(dtype, {length, t.shape[2], t.shape[3]});
    const std::int64_t rest = out.elements() / std::max<std::int64_t>(1, length);
    for (std::int64_t s = 0; s < length; ++s) {
      for (std::int64_t r = 0; r < rest; ++r) {
        store_double(out.view().data, dtype, s * rest + r,
                     load_double(t.data, t.dtype, (s * batch + e) * rest + r));
      }
    }
    return out;
  }

  // Batch element e of a tensor [b, s, ...] of 4-byte elements.
  Array take_rows(const std::string& name, std::int64_t e, DType dtype) const {
    const Array whole = file_.read(name);
    const Tensor& t = whole;
    rule(t.rank == 3 && t.dtype == dtype && t.shape[0] == batch && t.shape[1] == length,
         fmt::format("{} must be {} [b, s, ...]", name, dtype_name(dtype)), t);
    Array out(dtype, {length, t.shape[2]});
    std::copy_n(t.as<std::int32_t>() + e * out.elements(), out.elements(), out.as<std::int32_t>());
    return out;
  }

  // A golden result of one number.
  double number(const std::string& name) const {
    const Array whole = file_.read(name);
    rule(whole.elements() == 1 && is_float(whole.view().dtype), name + " must be one number",
         whole);
    return load_double(whole.view().data, whole.view().dtype, 0);
  }

  // starts and ends of packed cases; else every row sees the keys up to itself.
  RowRanges ranges() const {
    if (file_.find("starts") == nullptr && meta("cu_seqlens").is_null())
      return causal_ranges(length);
    const Array starts = file_.read("starts"), ends = file_.read("ends");
    for (const Array* a : {&starts, &ends}) {
      rule(a->view().dtype == DType::kI32 && a->elements() == length,
           "starts and ends must be i32 [s]", *a);
    }
    return {{starts.as<std::int32_t>(), starts.as<std::int32_t>() + length},
            {ends.as<std::int32_t>(), ends.as<std::int32_t>() + length}};
  }

  std::int64_t length = 0, batch = 0, topk = 0, value_dim = 0;
  bool relu = true;
  double softmax_scale = 0;

 private:
  static void rule(bool holds, const std::string& text, const Tensor& t) {
    if (!holds) fail(Status::kCorrupt, "golden", "{}, got {}", text, shape_text(t));
  }
  nlohmann::json meta(const std::string& name) const {
    const auto it = file_.metadata().find(name);
    nlohmann::json value = it == file_.metadata().end()
                               ? nlohmann::json(nlohmann::json::value_t::discarded)
                               : nlohmann::json::parse(it->second, nullptr, false);
    if (value.is_discarded())
      fail(Status::kCorrupt, "golden", "the metadata must hold \"{}\" as JSON", name);
    return value;
  }

  model::SafetensorsFile file_;
};

double element(const Tensor& t, std::int64_t i) { return load_double(t.data, t.dtype, i); }

double peak(const Tensor& t) {
  double largest = 0;
  for (std::int64_t i = 0; i < t.elements(); ++i)
    largest = std::max(largest, std::abs(element(t, i)));
  return largest;
}

// The largest p-norm of a vector along the last axis: p = 2, or 1.
double norm(const Tensor& t, std::int64_t channels, int p) {
  double largest = 0;
  const std::int64_t dim = t.shape[t.rank - 1];
  for (std::int64_t i = 0; i < t.elements(); i += dim) {
    double sum = 0;
    for (std::int64_t d = 0; d < channels; ++d)
      sum += p == 2 ? element(t, i + d) * element(t, i + d) : std::abs(element(t, i + d));
    largest = std::max(largest, p == 2 ? std::sqrt(sum) : sum);
  }
  return largest;
}
double norm2(const Tensor& t) { return norm(t, t.shape[t.rank - 1], 2); }

double log_of(double n) { return std::log(std::max(1.0, n)); }

// Bounds of what f32 arithmetic adds, to first order in the unit roundoff u, from norms of the
// inputs. A logit z = scale q.k has |z| <= Z = scale |q||k| and error gamma(dim + 1) Z, so a
// probability over n keys, exp(z - lse), has relative error
//   P = 2 gamma(dim + 1) Z + gamma(n + 8) + 2 u (Z + ln n)       (both logits, the sum, lse itself)
double probability_error(double logit, double dim, double n) {
  return 2 * gamma(dim + 1) * logit + gamma(n + 8) + 2 * kUnit * (logit + log_of(n));
}

// Attention of `rows` rows over n keys each. With D = |d_output||value|:
//   output    sum_s p v                    (P + gamma(n + 1)) max|v|
//   dz        p (dp - delta)               p D E,  E = 3 P + 3 gamma(dim_v + n + 4): P and the two
//                                          dots, |dp| and |delta| <= D; and |dz| <= 2 p D
//   d_query   scale sum_s dz k             scale D (E + 2 gamma(n + 2)) max|k|, as sum_s p = 1
//   d_key     scale sum_ih dz q            scale D (E + 2 gamma(m + 2)) m max|q|, m = rows heads >=
//                                          the sum of p over rows and heads
//   d_value   sum_ih p d_output            (P + gamma(m + 2)) m max|d_output|
struct AttentionBounds {
  double probability, output, d_query, d_key, d_value;
  AttentionBounds(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t dim_v,
                  const Tensor& d_output, double scale, double n) {
    const auto dim = static_cast<double>(q.shape[2]);
    const double m = static_cast<double>(q.shape[0] * q.shape[1]);
    const double v_norm = norm(v, dim_v, 2), D = norm2(d_output) * v_norm;
    probability = probability_error(scale * norm2(q) * norm2(k), dim, n);
    const double E = 3 * probability + 3 * gamma(static_cast<double>(dim_v) + n + 4);
    output = (probability + gamma(n + 1)) * peak(v);
    d_query = scale * D * (E + 2 * gamma(n + 2)) * peak(k);
    d_key = scale * D * (E + 2 * gamma(m + 2)) * m * peak(q);
    d_value = (probability + gamma(m + 2)) * m * peak(d_output);
  }
};

// The indexer and its loss, over n keys a row. A score has error S = gamma(dim + heads + 2) A with
// A = |w|_1 |q||k|; so ln p of the scores has T = 2 S + gamma(n + 8) + 2 u (2 A + ln n); the
// normalised target has relative error R = 2 P + 2 gamma(n + attention heads + 2).
//   kl       sum t (ln t - ln p)           (R + gamma(n + 2)) (24 + 2 A + ln n) + R + T, as
//                                          |ln max(t, 1e-10)| < 24
//   g        (p - t) d_kl                  sums of |error| and |g| over a row: d_kl (R + T), 2 d_kl
//   d_weights   sum_j g relu(u)            d_kl (R + T + 2 gamma(dim + n + 3)) |q||k|
//   d_query     w sum_j g k                d_kl (R + T + 2 gamma(n + 4)) max|w| max|k|
//   d_key       sum_ih g w q               d_kl (R + T + 2 gamma(rows heads + 4)) rows |w|_1 max|q|
struct IndexerBounds {
  double score, kl, d_query, d_key, d_weights;
  IndexerBounds(const Tensor& q, const Tensor& k, const Tensor& w, double probability,
                double attention_heads, double n, double d_kl) {
    const auto rows = static_cast<double>(q.shape[0]), heads = static_cast<double>(q.shape[1]);
    const auto dim = static_cast<double>(q.shape[2]);
    const double dot = norm2(q) * norm2(k), w1 = norm(w, w.shape[1], 1), A = w1 * dot;
    score = gamma(dim + heads + 2) * A;
    const double T = 2 * score + gamma(n + 8) + 2 * kUnit * (2 * A + log_of(n));
    const double R = 2 * probability + 2 * gamma(n + attention_heads + 2);
    kl = (R + gamma(n + 2)) * (24 + 2 * A + log_of(n)) + R + T;
    d_weights = d_kl * (R + T + 2 * gamma(dim + n + 3)) * dot;
    d_query = d_kl * (R + T + 2 * gamma(n + 4)) * peak(w) * peak(k);
    d_key = d_kl * (R + T + 2 * gamma(rows * heads + 4)) * rows * w1 * peak(q);
  }
};

// One file by one implementation, in one dtype.
class Comparer {
 public:
  Comparer(const GoldenFile& file, DType dtype, std::string implementation)
      : file_(file), dtype_(dtype), implementation_(std::move(implementation)) {}

  std::vector<GoldenResult> run() {
    const RowRanges ranges = file_.ranges();
    starts_ = make_tensor(ranges.starts.data(), DType::kI32, {file_.length});
    ends_ = make_tensor(ranges.ends.data(), DType::kI32, {file_.length});
    d_kl_ = 1 / static_cast<double>(file_.batch * file_.length);
    for (std::int64_t e = 0; e < file_.batch; ++e) {
      index_query_ = file_.take("index_query", e, dtype_);
      index_key_ = file_.take("index_key", e, dtype_);
      index_weights_ = file_.take("index_weights", e, dtype_);
      query_ = file_.take("query", e, dtype_);
      key_ = file_.take("key", e, dtype_);
      ids_ = file_.take_rows("topk_indices", e, DType::kI32);
      compare_scores(e);
      compare_selection(e);
      compare_attention(e, "mla");
      compare_attention(e, "mha");
      compare_sparse_loss(e);
      compare_dense_loss(e);
    }
    add("index_loss", "sparse_loss", sparse_kl_, file_.number("sparse_loss"), sparse_kl_bound_);
    add("dense_index_loss", "dense_loss", dense_kl_, file_.number("dense_loss"), dense_kl_bound_);
    std::vector<GoldenResult> results;
    for (const auto& [operation, tensors] : worst_) {
      bench::CheckResult result{"", label(), {}, ""};
      for (const auto& [name, worst] : tensors) {
        const bench::Comparison& x = worst.comparison();
        result.comparisons.push_back(x);
        if (!x.ok() && result.failure.empty())
          result.failure = fmt::format("{}: {:.3g} x the bound at {}", x.output, x.error, x.where);
      }
      results.push_back({operation, std::move(result)});
    }
    return results;
  }

 private:
  // Runs an operation by this implementation, or by the first that accepts if it refuses; only the
  // former counts.
  template <class Args>
  void call(void (*operation)(const Args&, Workspace), std::int64_t (*bytes)(const Args&),
            const Args& args) {
    const Explanation explanation = explain(args);
    const std::string& name = explanation.operation;
    counts_[name] = false;
    for (const Verdict& v : explanation.verdicts)
      counts_[name] |= v.implementation == implementation_ && v.refusal.empty();
    const bench::PinGuard pin(name, counts_[name] ? implementation_ : explanation.chosen());
    operation(args, scratch_.get(bytes(args)));
  }

  std::string label() const {
    return dtype_ == DType::kF64 ? implementation_ + " f64" : implementation_;
  }

  bench::Worst* worst(const std::string& operation, const std::string& tensor) {
    if (!counts_[operation]) return nullptr;
    return &worst_[operation].try_emplace(tensor, tensor).first->second;
  }

  void add(const std::string& operation, const std::string& name, double actual, double golden,
           double bound) {
    if (dtype_ == DType::kF64) bound = 0;
    bench::Worst* w = worst(operation, name);
    if (w != nullptr)
      w->add(actual, golden, bound + kGoldenError * std::abs(golden), [] { return "the sum"; });
  }

  // A whole tensor [s, b, ...] of the file; `bound` is what f32 arithmetic may add.
  void compare(const std::string& operation, std::int64_t e, const std::string& name,
               const Tensor& actual, double bound) {
    const Array golden = file_.take(name, e, DType::kF32);
    bench::Worst* w = worst(operation, name);
    if (w == nullptr) return;
    WINNOW_CHECK("golden", golden.elements() == actual.elements(), "{} must be {}, got {}", name,
                 shape_text(actual), shape_text(golden));
    double difference = 0, square = 0;
    for (std::int64_t i = 0; i < golden.elements(); ++i) {
      const double delta = element(actual, i) - element(golden, i);
      difference += delta * delta;
      square += element(golden, i) * element(golden, i);
    }
    const double own = kGoldenError * std::sqrt(square);
    if (dtype_ == DType::kF64) {
      w->add(std::sqrt(difference), 0, own, [&] { return fmt::format("batch {}, L2 norm", e); });
      return;
    }
    for (std::int64_t i = 0; i < golden.elements(); ++i) {
      w->add(element(actual, i), element(golden, i), bound + own,
             [&] { return fmt::format("batch {} element {}", e, i); });
    }
  }

  void compare_scores(std::int64_t e) {
    const Array golden = file_.take_rows("index_scores", e, DType::kF32);
    const Array scores(dtype_, {file_.length, file_.length});
    call(index_scores, index_scores_workspace_bytes,
         IndexScoresArgs{index_query_, index_key_, index_weights_, starts_, ends_, file_.relu,
                         scores});
    bench::Worst* inside = worst("index_scores", "index_scores");
    bench::Worst* outside = worst("index_scores", "outside the range");
    if (inside == nullptr) return;
    double largest = 0;
    for (std::int64_t i = 0; i < golden.elements(); ++i) {
      if (std::isfinite(element(golden, i)))
        largest = std::max(largest, std::abs(element(golden, i)));
    }
    const IndexerBounds b(index_query_, index_key_, index_weights_, 0, 0, 1, 0);
    const double bound = kGoldenError * largest + (dtype_ == DType::kF64 ? 0 : b.score);
    for (std::int64_t i = 0; i < file_.length; ++i) {
      const RowRange range = row_range(starts_, ends_, i, file_.length);
      for (std::int64_t j = 0; j < file_.length; ++j) {
        auto where = [&] { return fmt::format("batch {} row {} key {}", e, i, j); };
        const double truth = element(golden, i * file_.length + j);
        if (j < range.start || j >= range.end) {
          outside->add_exact(truth == -INFINITY, where);
        } else {
          inside->add(element(scores, i * file_.length + j - range.start), truth, bound, where);
        }
      }
    }
  }

  // The ids of a row as a set.
  static std::vector<std::int32_t> members(const Tensor& ids, std::int64_t row) {
    const std::int32_t* p = ids.as<std::int32_t>() + row * ids.shape[1];
    std::vector<std::int32_t> set;
    std::copy_if(p, p + ids.shape[1], std::back_inserter(set),
                 [](std::int32_t id) { return id >= 0; });
    std::sort(set.begin(), set.end());
    return set;
  }

  void compare_sets(const char* operation, std::int64_t e, const Tensor& ids) {
    bench::Worst* w = worst(operation, "topk_indices");
    for (std::int64_t i = 0; w != nullptr && i < file_.length; ++i) {
      w->add_exact(members(ids, i) == members(ids_, i),
                   [&] { return fmt::format("batch {} row {}", e, i); });
    }
  }

  // index_topk on the golden inputs, select_topk on the golden scores.
  void compare_selection(std::int64_t e) {
    const Array ids(DType::kI32, {file_.length, file_.topk}), lengths(DType::kI32, {file_.length});
    call(index_topk, index_topk_workspace_bytes,
         IndexTopkArgs{index_query_,
                       index_key_,
                       index_weights_,
                       starts_,
                       ends_,
                       file_.relu,
                       ids,
                       lengths,
                       {}});
    compare_sets("index_topk", e, ids);
    const Array golden = file_.take_rows("index_scores", e, DType::kF32);
    const Array scores(dtype_, {file_.length, file_.length});
    for (std::int64_t i = 0; i < file_.length; ++i) {
      const RowRange range = row_range(starts_, ends_, i, file_.length);
      for (std::int64_t t = 0; t < range.length(); ++t) {
        store_double(scores.view().data, dtype_, i * file_.length + t,
                     element(golden, i * file_.length + range.start + t));
      }
    }
    call(select_topk, select_topk_workspace_bytes,
         SelectTopkArgs{scores, starts_, ends_, ids, lengths, {}});
    compare_sets("select_topk", e, ids);
  }

  // "mla": one latent key head, its first channels are the value. "mha": separate key and value.
  void compare_attention(std::int64_t e, const std::string& kind) {
    const bool mla = kind == "mla";
    const Array key = mla ? key_.clone() : file_.take("mha.key", e, dtype_);
    const Array value = mla ? Array() : file_.take("mha.value", e, dtype_);
    const Array d_output = file_.take(kind + ".d_output", e, dtype_);
    const Tensor& q = query_;
    const Array output(dtype_, {q.shape[0], q.shape[1], file_.value_dim});
    const Array lse(dtype_, {q.shape[0], q.shape[1]});
    call(sparse_attention, sparse_attention_workspace_bytes,
         SparseAttentionArgs{
             query_, key, value, ids_, {}, starts_, ends_, file_.softmax_scale, output, lse});
    const Array d_query(dtype_, {q.shape[0], q.shape[1], q.shape[2]});
    const Tensor& k = key;
    const Array d_key(dtype_, {k.shape[0], k.shape[1], k.shape[2]});
    const Array d_value = mla ? Array() : Array(dtype_, {k.shape[0], k.shape[1], file_.value_dim});
    call(sparse_attention_backward, sparse_attention_backward_workspace_bytes,
         SparseAttentionBackwardArgs{query_,
                                     key,
                                     value,
                                     ids_,
                                     {},
                                     starts_,
                                     ends_,
                                     file_.softmax_scale,
                                     output,
                                     lse,
                                     d_output,
                                     d_query,
                                     d_key,
                                     d_value});
    const AttentionBounds b(query_, key, mla ? k : value.view(), file_.value_dim, d_output,
                            file_.softmax_scale, static_cast<double>(ids_.view().shape[1]));
    const char* backward = "sparse_attention_backward";
    compare("sparse_attention", e, kind + ".output", output, b.output);
    compare(backward, e, kind + ".d_query", d_query, b.d_query);
    compare(backward, e, kind + ".d_key", d_key, b.d_key + (mla ? b.d_value : 0));
    if (!mla) compare(backward, e, kind + ".d_value", d_value, b.d_value);
  }

  // The lse of the MLA attention, over the selection or over the whole range.
  Array mla_lse(const Tensor& ids) {
    const Tensor& q = query_;
    const Array output(dtype_, {q.shape[0], q.shape[1], file_.value_dim});
    Array lse(dtype_, {q.shape[0], q.shape[1]});
    call(sparse_attention, sparse_attention_workspace_bytes,
         SparseAttentionArgs{
             query_, key_, {}, ids, {}, starts_, ends_, file_.softmax_scale, output, lse});
    return lse;
  }

  // Gradients of the loss, and its bounds over n keys a row; the row losses add up over the batch.
  struct LossOutputs {
    Array kl, d_query, d_key, d_weights;
  };
  LossOutputs loss_outputs() const {
    const Tensor &q = index_query_, &k = index_key_;
    return {Array(dtype_, {q.shape[0]}), Array(dtype_, {q.shape[0], q.shape[1], q.shape[2]}),
            Array(dtype_, {k.shape[0], k.shape[1]}), Array(dtype_, {q.shape[0], q.shape[1]})};
  }
  void compare_loss(std::int64_t e, const std::string& kind, const std::string& operation,
                    const LossOutputs& out, double n, double* kl, double* kl_bound) {
    const AttentionBounds attention(query_, key_, key_, file_.value_dim, query_,
                                    file_.softmax_scale, n);
    const IndexerBounds b(index_query_, index_key_, index_weights_, attention.probability,
                          static_cast<double>(query_.view().shape[1]), n, d_kl_);
    for (std::int64_t i = 0; i < file_.length; ++i) *kl += element(out.kl, i) * d_kl_;
    *kl_bound = std::max(*kl_bound, b.kl);
    compare(operation, e, kind + ".d_index_query", out.d_query, b.d_query);
    compare(operation, e, kind + ".d_index_key", out.d_key, b.d_key);
    compare(operation, e, kind + ".d_index_weights", out.d_weights, b.d_weights);
  }

  void compare_sparse_loss(std::int64_t e) {
    const std::int64_t topk = ids_.view().shape[1];
    const Array lse = mla_lse(ids_), target(dtype_, {file_.length, topk});
    const Array scores(dtype_, {file_.length, topk}), d_scores(dtype_, {file_.length, topk});
    const LossOutputs out = loss_outputs();
    call(attention_target, attention_target_workspace_bytes,
         AttentionTargetArgs{query_, key_, lse, ids_, starts_, ends_, file_.softmax_scale, target});
    call(index_scores_at, index_scores_at_workspace_bytes,
         IndexScoresAtArgs{index_query_, index_key_, index_weights_, ids_, starts_, ends_,
                           file_.relu, scores});
    call(index_loss, index_loss_workspace_bytes,
         IndexLossArgs{target, scores, ids_, starts_, ends_, d_kl_, out.kl, d_scores});
    call(index_scores_at_backward, index_scores_at_backward_workspace_bytes,
         IndexScoresAtBackwardArgs{index_query_, index_key_, index_weights_, ids_, starts_, ends_,
                                   file_.relu, d_scores, out.d_query, out.d_key, out.d_weights});
    compare_loss(e, "sparse_loss", "index_scores_at_backward", out, static_cast<double>(topk),
                 &sparse_kl_, &sparse_kl_bound_);
  }

  void compare_dense_loss(std::int64_t e) {
    const Array lse = mla_lse({});
    const LossOutputs out = loss_outputs();
    DenseIndexLossArgs args{
        index_query_, index_key_,          index_weights_, file_.relu,   query_, key_,
        lse,          file_.softmax_scale, starts_,        ends_,        d_kl_,  {},
        out.kl,       out.d_query,         out.d_key,      out.d_weights};
    call(dense_index_loss, dense_index_loss_workspace_bytes, args);
    compare_loss(e, "dense_loss", "dense_index_loss", out, static_cast<double>(file_.length),
                 &dense_kl_, &dense_kl_bound_);
  }

  const GoldenFile& file_;
  DType dtype_;
  std::string implementation_;
  Scratch scratch_;
  Array index_query_, index_key_, index_weights_, query_, key_, ids_;
  Tensor starts_, ends_;
  double d_kl_ = 0, sparse_kl_ = 0, sparse_kl_bound_ = 0, dense_kl_ = 0, dense_kl_bound_ = 0;
  std::map<std::string, bool> counts_;  // did this implementation run the operation
  std::map<std::string, std::map<std::string, bench::Worst>> worst_;  // operation, tensor
};

}  // namespace

std::vector<GoldenResult> check_golden_ops(const std::filesystem::path& path) {
  const GoldenFile file(path);
  std::vector<GoldenResult> results = Comparer(file, DType::kF64, "reference").run();
  const Array query(DType::kF32, {1, 1, 8}), key(DType::kF32, {1, 8}), weight(DType::kF32, {1, 1}),
      score(DType::kF32, {1, 1}), bound(DType::kI32, {1});
  for (const Verdict& v :
       explain(IndexScoresArgs{query, key, weight, bound, bound, true, score}).verdicts) {
    for (GoldenResult& result : Comparer(file, DType::kF32, v.implementation).run())
      results.push_back(std::move(result));
  }
  return results;
}

}  // namespace winnow::app
