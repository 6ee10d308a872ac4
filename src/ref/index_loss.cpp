// kl[i] = KL(target || softmax of the selected scores) and its gradient by the scores, in double.
#include "ref/implementations.h"
#include "ref/kl.h"
#include "ref/reader.h"

namespace winnow::ref {
namespace {

void run(const IndexLossArgs& a, Workspace) {
  constexpr std::int64_t kAnyKey = INT64_MAX;  // the key space is not known here
  const std::int64_t topk = a.topk_indices.shape[1];
  for (std::int64_t i = 0; i < a.topk_indices.shape[0]; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, kAnyKey);
    auto counts = [&](std::int64_t s) { return range.contains(get_id(a.topk_indices, i, s)); };
    RowLoss loss;
    for (std::int64_t s = 0; s < topk; ++s) {
      if (counts(s)) loss.see(get(a.attention_target, i, s), get(a.topk_scores, i, s));
    }
    double kl = 0;
    for (std::int64_t s = 0; s < topk; ++s) {
      double d_score = 0;
      if (counts(s) && !loss.empty()) {
        const double target = get(a.attention_target, i, s), score = get(a.topk_scores, i, s);
        kl += loss.kl(target, score);
        d_score = loss.gradient(target, score) * a.d_kl;
      }
      set(a.d_scores, i, s, d_score);
    }
    set(a.kl, i, kl);
  }
}

}  // namespace

const Implementation<IndexLossArgs> index_loss_implementation = {"reference", accept, no_workspace,
                                                                 run};

}  // namespace winnow::ref
