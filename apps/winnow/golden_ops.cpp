// Golden vectors of ops/: index scores, selections, sparse attention (MLA and MHA) and the indexer
// losses of one layer, with gradients; [s, b, ...] float32, causal or packed, one file per case.
//
// Each operation gets the golden inputs, so that errors do not pile up; what golden files do not
// hold (lse, targets, scores of a selection) comes from the operations before it.
#include <algorithm>
#include <cmath>

#include "apps/winnow/golden_bounds.h"
#include "apps/winnow/golden_comparer.h"
#include "apps/winnow/golden_reader.h"
#include "base/row_range.h"
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

// What a double computation leaves between itself and the golden float32 numbers: the L2 norm of
// the difference over that of the tensor. No element differs by more than this share of the norm.
constexpr double kGoldenError = 4e-7;

// A file of ops/: [s, b, ...] inputs of one layer.
class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path) : reader_(path) {
    topk = reader_.meta_whole("topk");
    value_dim = reader_.meta_whole("value_dim");
    relu = reader_.meta_flag("relu");
    softmax_scale = reader_.meta_real("softmax_scale");
    const Array query = reader_.read("index_query");
    GoldenReader::rule(query.view().rank == 4, "index_query must be [s, b, heads, dim]", query);
    length = query.view().shape[0];
    batch = query.view().shape[1];
  }

  // Batch element e of a floating tensor [s, b, ...] as [s, ...].
  Array take(const std::string& name, std::int64_t e, DType dtype) const {
    return reader_.slice(name, 1, e, {length, batch}, dtype);
  }
  // Batch element e of a tensor [b, s, ...].
  Array take_rows(const std::string& name, std::int64_t e, DType dtype) const {
    return reader_.slice(name, 0, e, {batch, length}, dtype);
  }
  double number(const std::string& name) const { return reader_.number(name); }

  // starts and ends of packed cases; else every row sees the keys up to itself.
  RowRanges ranges() const {
    if (!reader_.has("starts") && reader_.meta_null("cu_seqlens")) return causal_ranges(length);
    const Array starts = reader_.read("starts"), ends = reader_.read("ends");
    for (const Array* a : {&starts, &ends}) {
      GoldenReader::rule(a->view().dtype == DType::kI32 && a->elements() == length,
                         "starts and ends must be i32 [s]", *a);
    }
    return {{starts.as<std::int32_t>(), starts.as<std::int32_t>() + length},
            {ends.as<std::int32_t>(), ends.as<std::int32_t>() + length}};
  }

  std::int64_t length = 0, batch = 0, topk = 0, value_dim = 0;
  bool relu = true;
  double softmax_scale = 0;

 private:
  GoldenReader reader_;
};

// One file by one implementation, in one dtype.
class OpsComparer : private GoldenComparer {
 public:
  OpsComparer(const GoldenFile& file, DType dtype, std::string implementation)
      : GoldenComparer(dtype, std::move(implementation)), file_(file) {}

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
    return results();
  }

 private:
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
  Array index_query_, index_key_, index_weights_, query_, key_, ids_;
  Tensor starts_, ends_;
  double d_kl_ = 0, sparse_kl_ = 0, sparse_kl_bound_ = 0, dense_kl_ = 0, dense_kl_bound_ = 0;
};

}  // namespace

std::vector<GoldenResult> check_golden_ops(const std::filesystem::path& path) {
  const GoldenFile file(path);
  std::vector<GoldenResult> results;
  if (bench::Placement::current() == nullptr)  // GPUs leave f64 to CPUs
    results = OpsComparer(file, DType::kF64, "reference").run();
  const Array query(DType::kF32, {1, 1, 8}), key(DType::kF32, {1, 8}), weight(DType::kF32, {1, 1}),
      score(DType::kF32, {1, 1}), bound(DType::kI32, {1});
  for (const Verdict& v :
       explain(IndexScoresArgs{query, key, weight, bound, bound, true, score}).verdicts) {
    for (GoldenResult& result : OpsComparer(file, DType::kF32, v.implementation).run())
      results.push_back(std::move(result));
  }
  return results;
}

}  // namespace winnow::app
