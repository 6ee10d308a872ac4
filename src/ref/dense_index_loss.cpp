// The indexer loss over every visible key and its gradients, one row at a time, in double. A tile
// of the target is 1024 keys of one row.
#include "ref/attention_mass.h"
#include "ref/implementations.h"
#include "ref/index_score_backward.h"
#include "ref/kl.h"

namespace winnow::ref {
namespace {

constexpr std::int64_t kTileKeys = 1024;

std::int64_t doubles(const DenseIndexLossArgs& a) {
  return 2 * a.index_key.shape[0] + index_backward_doubles(a.index_query, a.index_key);
}
std::int64_t workspace_bytes(const DenseIndexLossArgs& a) { return bytes_for_doubles(doubles(a)); }

void run(const DenseIndexLossArgs& a, Workspace workspace) {
  const std::int64_t rows = a.index_query.shape[0], keys = a.index_key.shape[0];
  double* target = doubles_in(workspace);
  double* score = target + keys;
  IndexScoreBackward backward(a.index_query, a.index_key, a.index_weights, a.relu, score + keys);
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    const std::int64_t length = range.length();
    for (std::int64_t t = 0; t < length; ++t) {
      const std::int64_t j = range.start + t;
      target[t] = attention_mass(a.query, a.key, a.lse, a.softmax_scale, i, j);
      score[t] = index_score(a.index_query, a.index_key, a.index_weights, a.relu, i, j);
    }
    for (std::int64_t t = 0; a.reduce_target && t < length; t += kTileKeys) {
      const std::int64_t count = std::min(kTileKeys, length - t);
      a.reduce_target(make_tensor(target + t, DType::kF64, {1, count}));
    }
    RowLoss loss;
    for (std::int64_t t = 0; t < length; ++t) loss.see(target[t], score[t]);
    double kl = 0;
    backward.begin_row(i);
    for (std::int64_t t = 0; t < length && !loss.empty(); ++t) {
      kl += loss.kl(target[t], score[t]);
      backward.add(range.start + t, loss.gradient(target[t], score[t]) * a.d_kl);
    }
    backward.end_row(a.d_index_query, a.d_index_weights);
    set(a.kl, i, kl);
  }
  backward.end(a.d_index_key);
}

}  // namespace

const Implementation<DenseIndexLossArgs> dense_index_loss_implementation = {"reference", accept,
                                                                            workspace_bytes, run};

}  // namespace winnow::ref
