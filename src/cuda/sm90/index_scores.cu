// index_scores on compute capability 9.0: the scorer of scorer.cu, its scores stored as they come.
// cuda.sm90_fp8 multiplies FP8 as it is; it runs where it is pinned.
#include "base/implementation.h"
#include "cuda/sm90/scorer.h"
#include "winnow/index_scores.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr std::int64_t kAlignment = 16;

template <Products kProducts>
Refusal refuse(const IndexScoresArgs& a) {
  const Refusal refusal = kProducts == Products::kBF16 ? refuse_scorer(a) : refuse_code_scorer(a);
  if (refusal.empty() && !has_unit_stride(a.index_scores)) {
    return "index_scores must have stride 1 on its last axis";
  }
  return refusal;
}

template <Products kProducts>
std::int64_t workspace_bytes(const IndexScoresArgs& a) {
  const auto& q = a.index_query.shape;
  const std::int64_t bytes = score_workspace_bytes(q[0], a.index_key.keys(), static_cast<int>(q[1]),
                                                   a.index_query.dtype, kProducts);
  return bytes == 0 ? 0 : bytes + kAlignment - 1;
}

template <Products kProducts>
void run(const IndexScoresArgs& a, Workspace workspace) {
  Scorer s = Scorer::of(a);
  s.scores = a.index_scores.as<float>();
  s.score_row = a.index_scores.strides[0];
  s.width = a.index_scores.shape[1];
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
  auto* scratch = static_cast<unsigned char*>(workspace.data) +
                  (kAlignment - address % kAlignment) % kAlignment;
  score("index_scores", s, scratch, kProducts, stream_of(workspace));
}

}  // namespace

extern const Implementation<IndexScoresArgs> index_scores_implementation;
const Implementation<IndexScoresArgs> index_scores_implementation = {
    "cuda.sm90", refuse<Products::kBF16>, workspace_bytes<Products::kBF16>, run<Products::kBF16>};
extern const Implementation<IndexScoresArgs> index_scores_fp8_implementation;
const Implementation<IndexScoresArgs> index_scores_fp8_implementation = {
    "cuda.sm90_fp8", refuse<Products::kE4M3>, workspace_bytes<Products::kE4M3>,
    run<Products::kE4M3>};

}  // namespace winnow::cuda::sm90
