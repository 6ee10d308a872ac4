// index_scores on CPUs: the scorer of scorer.h, its scores stored as they come.
//
// Tasks: rows of one ScorerPlan times spans of 1024 keys. 2 * heads * dim FLOPs per score against 4
// bytes written: bound by the FMA units.
#include "winnow/index_scores.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/scorer.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kSpan = 1024;  // keys of a task

ScorerPlan plan_of(const IndexScoresArgs& a) { return {ScorerInputs::of(a), ScorerPlan::kMaxRows}; }

Refusal refuse(const IndexScoresArgs& a) {
  Refusal refusal = refuse_scorer(ScorerInputs::of(a));
  if (refusal.empty() && !has_unit_stride(a.index_scores)) {
    refusal = "index_scores must have stride 1 on its last axis";
  }
  return refusal;
}

std::int64_t worker_bytes(const ScorerPlan& plan) {
  Carve carve(nullptr);
  ScorerScratch(carve, plan);
  return carve.used();
}

std::int64_t workspace_bytes(const IndexScoresArgs& a) {
  return worker_bytes(plan_of(a)) * num_threads() + 63;
}

void run(const IndexScoresArgs& a, Workspace workspace) {
  const ScorerInputs in = ScorerInputs::of(a);
  const ScorerPlan plan = plan_of(a);
  const std::int64_t rows = in.query.shape[0], width = a.index_scores.shape[1];
  const std::int64_t spans = ceil_div(in.key.keys(), kSpan);
  Carve carve(workspace.data);
  const std::int64_t own_bytes = worker_bytes(plan);
  auto* scratch_of_workers = carve.take<unsigned char>(own_bytes * num_threads());

  parallel_for(ceil_div(rows, plan.rows) * spans, [&](std::int64_t task, int worker) {
    const std::int64_t first_row = task / spans * plan.rows, span = task % spans * kSpan;
    const std::int64_t row_count = min64(plan.rows, rows - first_row);
    RowRange visible[ScorerPlan::kMaxRows];
    std::int64_t start[ScorerPlan::kMaxRows];  // the key of column 0
    for (std::int64_t r = 0; r < row_count; ++r) {
      const RowRange range = in.range(first_row + r);
      start[r] = range.start;
      visible[r] =
          overlap({range.start, min64(range.end, range.start + width)}, {span, span + kSpan});
    }
    Carve own(scratch_of_workers + worker * own_bytes);
    const ScorerScratch scratch(own, plan);
    score_rows(in, plan, scratch, first_row, row_count, visible,
               [&](std::int64_t r, std::int64_t key, std::int64_t n, const float* scores) {
                 float* out = a.index_scores.as<float>() +
                              (first_row + r) * a.index_scores.strides[0] + key - start[r];
                 __builtin_memcpy(out, scores, static_cast<std::size_t>(n) * sizeof(float));
               });
  });
}

}  // namespace

extern const Implementation<IndexScoresArgs> index_scores_implementation;
const Implementation<IndexScoresArgs> index_scores_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                     refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
