// index_topk on CPUs: the scorer of scorer.h, one TopkStream per row behind it. No score matrix.
//
// Tasks: the rows of one ScorerPlan, times spans of the keys where there are too few rows for many
// threads. The spans of a row are merged in the order of ids; the selection is exact, so any split
// gives the same answer. The number of spans depends on the number of rows only.
//
// Bound by the scorer: 2 * heads * dim FLOPs per score; a stream costs about one comparison per
// score, 1 % of that at 64 x 128.
#include "winnow/index_topk.h"

#include "base/cpu_features.h"
#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/scorer.h"
#include "cpu/topk_stream.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTasks = 16;               // wanted at least
constexpr std::int64_t kLeastSpan = 1024;         // keys
constexpr std::int64_t kStreamBytes = 4ll << 20;  // of all streams of a worker, about

ScorerInputs inputs(const IndexTopkArgs& a) {
  return {a.index_query, a.index_key,         a.index_weights,   a.starts,   a.ends,
          a.relu,        a.index_query_scale, a.index_key_scale, a.dot_scale};
}

Refusal refuse(const IndexTopkArgs& a) {
  Refusal refusal = refuse_instruction_set(WINNOW_STRING(WINNOW_ISA));
  if (refusal.empty()) refusal = refuse_scorer(inputs(a));
  if (refusal.empty() && !(has_unit_stride(a.topk_indices) && has_unit_stride(a.topk_scores))) {
    refusal = "topk_indices and topk_scores must have stride 1 on their last axis";
  }
  return refusal;
}

struct Plan {
  std::int64_t k;
  ScorerPlan scorer;
  std::int64_t row_blocks, spans;

  explicit Plan(const IndexTopkArgs& a)
      : k(a.topk_indices.shape[1]),
        scorer(inputs(a), max64(1, kStreamBytes / (TopkStream::array_length(k) * 8))),
        row_blocks(ceil_div(a.index_query.shape[0], scorer.rows)),
        spans(max64(1, kTasks / max64(1, row_blocks))) {}
};

// Scratch of one worker: the scorer's and the streams of its rows.
struct Scratch {
  ScorerScratch scorer;
  float* scores;  // [rows][array_length]
  std::int32_t *ids, *work;

  Scratch(Carve& carve, const Plan& plan)
      : scorer(carve, plan.scorer),
        scores(carve.take<float>(plan.scorer.rows * TopkStream::array_length(plan.k))),
        ids(carve.take<std::int32_t>(plan.scorer.rows * TopkStream::array_length(plan.k))),
        work(carve.take<std::int32_t>(TopkStream::array_length(plan.k))) {}

  void start(TopkStream& stream, std::int64_t row, std::int64_t k) const {
    const std::int64_t offset = row * TopkStream::array_length(k);
    stream.start(k, scores + offset, ids + offset, work);
  }
};

// The best of each row and span, where there are several spans.
struct Parts {
  float* scores;          // [rows][spans][padded k]
  std::int32_t* ids;      // [rows][spans][padded k]
  std::int32_t* lengths;  // [rows][spans]
  std::int64_t k, spans, length;

  Parts(Carve& carve, const Plan& plan, std::int64_t rows)
      : k(plan.k), spans(plan.spans), length((plan.k + 31) / 32 * 32) {
    const std::int64_t parts = spans > 1 ? rows * spans : 0;
    scores = carve.take<float>(parts * length);
    ids = carve.take<std::int32_t>(parts * length);
    lengths = carve.take<std::int32_t>(parts);
  }
  TopkRow part(std::int64_t row, std::int64_t span) const {
    const std::int64_t i = row * spans + span;
    return {ids + i * length, lengths + i, scores + i * length, k};
  }
};

std::int64_t worker_bytes(const Plan& plan) {
  Carve carve(nullptr);
  Scratch(carve, plan);
  return carve.used();
}

std::int64_t workspace_bytes(const IndexTopkArgs& a) {
  const Plan plan(a);
  Carve carve(nullptr);
  Parts(carve, plan, a.index_query.shape[0]);
  return carve.used() + worker_bytes(plan) * num_threads() + 63;
}

void run(const IndexTopkArgs& a, Workspace workspace) {
  const ScorerInputs in = inputs(a);
  const Plan plan(a);
  const std::int64_t rows = in.query.shape[0], keys = in.key.keys(), own_bytes = worker_bytes(plan);
  const std::int64_t span = max64(kLeastSpan, ceil_div(keys, plan.spans));
  Carve carve(workspace.data);
  const Parts parts(carve, plan, rows);
  auto* scratch_of_workers = carve.take<unsigned char>(own_bytes * num_threads());
  auto output = [&](std::int64_t row) {
    return row_of(a.topk_indices, a.topk_lengths, a.topk_scores, row);
  };

  parallel_for(plan.row_blocks * plan.spans, [&](std::int64_t task, int worker) {
    const std::int64_t first_row = task / plan.spans * plan.scorer.rows, s = task % plan.spans;
    const std::int64_t row_count = min64(plan.scorer.rows, rows - first_row);
    Carve own(scratch_of_workers + worker * own_bytes);
    const Scratch scratch(own, plan);
    RowRange visible[ScorerPlan::kMaxRows];
    TopkStream stream[ScorerPlan::kMaxRows];
    for (std::int64_t r = 0; r < row_count; ++r) {
      visible[r] = in.range(first_row + r);
      if (plan.spans > 1) visible[r] = overlap(visible[r], {s * span, (s + 1) * span});
      scratch.start(stream[r], r, plan.k);
    }
    score_rows(in, plan.scorer, scratch.scorer, first_row, row_count, visible,
               [&](std::int64_t r, std::int64_t key, std::int64_t n, const float* scores) {
                 stream[r].push(scores, n, key);
               });
    for (std::int64_t r = 0; r < row_count; ++r) {
      const std::int64_t row = first_row + r;
      stream[r].write(plan.spans > 1 ? parts.part(row, s) : output(row));
    }
  });
  if (plan.spans == 1) return;

  parallel_for(rows, [&](std::int64_t row, int worker) {
    Carve own(scratch_of_workers + worker * own_bytes);
    const Scratch scratch(own, plan);
    TopkStream stream;
    scratch.start(stream, 0, plan.k);
    for (std::int64_t s = 0; s < plan.spans; ++s) {
      const TopkRow part = parts.part(row, s);
      stream.push_listed(part.scores, part.ids, *part.length);
    }
    stream.write(output(row));
  });
}

}  // namespace

extern const Implementation<IndexTopkArgs> index_topk_implementation;
const Implementation<IndexTopkArgs> index_topk_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                                 workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
