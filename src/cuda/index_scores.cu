// index_scores on GPUs: the scorer of scorer.cu, its scores stored as they come.
#include "base/implementation.h"
#include "cuda/scorer.h"
#include "winnow/index_scores.h"

namespace winnow::cuda {
namespace {

Refusal refuse(const IndexScoresArgs& a) {
  const Refusal refusal = refuse_scorer(a);
  if (refusal.empty() && !has_unit_stride(a.index_scores)) {
    return "index_scores must have stride 1 on its last axis";
  }
  return refusal;
}

std::int64_t workspace_bytes(const IndexScoresArgs&) { return 0; }

void run(const IndexScoresArgs& a, Workspace workspace) {
  Scorer s = Scorer::of(a);
  s.scores = a.index_scores.as<float>();
  s.score_row = a.index_scores.strides[0];
  s.width = a.index_scores.shape[1];
  score("index_scores", s, stream_of(workspace));
}

}  // namespace

extern const Implementation<IndexScoresArgs> index_scores_implementation;
const Implementation<IndexScoresArgs> index_scores_implementation = {"cuda.portable", refuse,
                                                                     workspace_bytes, run};

}  // namespace winnow::cuda
