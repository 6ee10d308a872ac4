#include "plan/workspace.h"

#include <algorithm>

#include "nn/matmul.h"
#include "plan/machine.h"
#include "plan/memory.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::plan {
namespace {

using attention::AttentionConfig;
using attention::AttentionKind;
using attention::AttentionMode;

Tensor shape(DType dtype, std::initializer_list<std::int64_t> extents) {
  return make_tensor(nullptr, dtype, extents);
}

// The operations of one layer, in shapes alone.
class Shapes {
 public:
  explicit Shapes(const PlanConfig& c)
      : c_(c), a_(c.model.attention), rows_(c.rows()), keys_(c.rows() * c.cp) {
    const bool mla = a_.kind == AttentionKind::kMla;
    dim_qk_ = a_.dim_qk();
    dim_v_ = a_.dim_v();
    kv_heads_ = mla ? 1 : a_.kv_heads;
    range_ = shape(DType::kI32, {rows_});
    query_ = shape(c.dtype, {rows_, a_.heads, dim_qk_});
    key_ = shape(c.dtype, {keys_, kv_heads_, dim_qk_});
    if (!mla) value_ = shape(c.dtype, {keys_, kv_heads_, dim_v_});
    output_ = shape(c.dtype, {rows_, a_.heads, dim_v_});
    lse_ = shape(DType::kF32, {rows_, a_.heads});
    index_query_ = shape(c.dtype, {rows_, a_.indexer.index_heads, a_.indexer.index_dim});
    index_key_ = shape(c.dtype, {keys_ / a_.indexer.pool_size, a_.indexer.index_dim});
    index_weights_ = shape(c.dtype, {rows_, a_.indexer.index_heads});
    if (c.mode().attention == AttentionMode::kSparse) {
      ids_ = shape(DType::kI32, {rows_, a_.indexer.selection_width()});
      lengths_ = range_;
    }
    scores_ = shape(DType::kF32, {rows_, a_.indexer.topk});
  }

  std::int64_t attention() const {
    SparseAttentionArgs a;
    attends(a);
    a.value = value_;
    a.topk_indices = ids_;
    a.topk_lengths = lengths_;
    a.output = output_;
    return sparse_attention_workspace_bytes(a);
  }
  std::int64_t attention_backward() const {
    SparseAttentionBackwardArgs a;
    attends(a);
    a.value = value_;
    a.topk_indices = ids_;
    a.topk_lengths = lengths_;
    a.output = a.d_output = output_;
    a.d_query = shape(DType::kF32, {rows_, a_.heads, dim_qk_});
    a.d_key = shape(DType::kF32, {keys_, kv_heads_, dim_qk_});
    if (!value_.empty()) a.d_value = shape(DType::kF32, {keys_, kv_heads_, dim_v_});
    return sparse_attention_backward_workspace_bytes(a);
  }
  std::int64_t selection() const {
    IndexTopkArgs a;
    scores(a);
    a.relu = a_.indexer.relu;
    a.topk_indices = shape(DType::kI32, {rows_, a_.indexer.topk / a_.indexer.pool_size});
    a.topk_lengths = range_;
    if (c_.mode().index_loss) a.topk_scores = scores_;
    return index_topk_workspace_bytes(a);
  }
  std::int64_t sparse_loss() const {
    AttentionTargetArgs target;
    attends(target);
    target.topk_indices = ids_;
    target.attention_target = scores_;
    IndexLossArgs loss;
    loss.attention_target = loss.topk_scores = loss.d_scores = scores_;
    loss.topk_indices = ids_;
    loss.starts = loss.ends = range_;
    loss.kl = shape(DType::kF32, {rows_});
    IndexScoresAtBackwardArgs backward;
    scores(backward);
    backward.topk_indices = ids_;
    backward.d_scores = scores_;
    gradients(backward);
    return std::max({attention_target_workspace_bytes(target), index_loss_workspace_bytes(loss),
                     index_scores_at_backward_workspace_bytes(backward)});
  }
  std::int64_t dense_loss() const {
    DenseIndexLossArgs a;
    scores(a);
    attends(a);
    a.kl = shape(DType::kF32, {rows_});
    gradients(a);
    return dense_index_loss_workspace_bytes(a);
  }
  // What matrix products keep beside: the largest of the model's, x w^T and the gradient of w.
  std::int64_t products() const {
    const model::ModelConfig& m = c_.model;
    const std::int64_t wide = std::max(m.intermediate_size, m.vocab_size);
    const Tensor x = shape(c_.dtype, {rows_, m.attention.hidden_size}),
                 y = shape(c_.dtype, {rows_, wide}),
                 w = shape(c_.dtype, {wide, m.attention.hidden_size});
    return std::max(nn::matmul_scratch_bytes(x, w.transposed(), y, false),
                    nn::matmul_scratch_bytes(y.transposed(), x, w, true));
  }

 private:
  // What every operation of attention is given.
  template <class Args>
  void attends(Args& args) const {
    args.query = query_;
    args.key = key_;
    args.lse = lse_;
    args.starts = args.ends = range_;
    args.softmax_scale = 1;
  }
  // What every operation of the indexer is given.
  template <class Args>
  void scores(Args& args) const {
    args.index_query = index_query_;
    args.index_key = index_key_;
    args.index_weights = index_weights_;
    args.starts = args.ends = range_;
  }
  template <class Args>
  void gradients(Args& args) const {
    const attention::IndexerConfig& i = a_.indexer;
    args.d_index_query = shape(DType::kF32, {rows_, i.index_heads, i.index_dim});
    args.d_index_key = shape(DType::kF32, {keys_, i.index_dim});
    args.d_index_weights = shape(DType::kF32, {rows_, i.index_heads});
  }

  const PlanConfig& c_;
  const AttentionConfig& a_;
  const std::int64_t rows_, keys_;
  std::int64_t dim_qk_ = 0, dim_v_ = 0, kv_heads_ = 1;
  Tensor range_, query_, key_, value_, output_, lse_, index_query_, index_key_, index_weights_,
      ids_, lengths_, scores_;
};

}  // namespace

double workspace_bytes(const PlanConfig& c, bool indexes) {
  const Machine* machine = find_machine(c.machine);
  if (machine == nullptr || !machine->cpu) {
    return indexes ? static_cast<double>(score_chunks(c).bytes) : 0;
  }
  const Shapes shapes(c);
  const bool sparse = c.mode().attention == AttentionMode::kSparse;
  const bool warmup = c.mode().attention == AttentionMode::kWarmup;
  std::int64_t bytes = shapes.attention();
  if (!warmup) bytes = std::max(bytes, shapes.attention_backward());
  if (indexes && sparse) bytes = std::max(bytes, shapes.selection());
  if (indexes && sparse && c.mode().index_loss) bytes = std::max(bytes, shapes.sparse_loss());
  if (indexes && warmup) bytes = std::max(bytes, shapes.dense_loss());
  return static_cast<double>(bytes + shapes.products());
}

}  // namespace winnow::plan
