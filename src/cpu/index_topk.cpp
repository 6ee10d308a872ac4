// index_topk on CPUs: the scorer of scorer.h, one TopkStream per row behind it. No score matrix.
//
// Tasks: the rows of one ScorerPlan, times spans of the keys that they see, where rows alone are
// too few tasks for the threads. The spans of a row are merged in the order of ids; the selection
// is exact, so any split gives the same answer. One thread cuts nothing. Under a budget, tasks take
// fewer rows, then fewer workers run, then rows are not cut into spans.
//
// What a span has found spares the later ones most of their candidates: a score that k others of
// the row reach is its floor (Floors). Who finishes first is open, but a floor takes away only what
// is not selected.
//
// Balance: threads take tasks as they become free, so a call ends at most one task after the work
// of the average thread. Hence four tasks per thread, where the parts fit kPartBytes; the first
// spans of all rows come first and are three times as long as the last, which are 1 / 8 of a
// thread's work. A cut is not free: a span keeps its own k best, which are merged; hence no more
// than that.
//
// Bound by the scorer: 2 * heads * dim FLOPs per score; a stream costs about one comparison per
// score, 1 % of that at 64 x 128.
#include "winnow/index_topk.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/selection_statistics.h"
#include "cpu/scorer.h"
#include "cpu/selection.h"
#include "winnow/chunks.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTasksPerThread = 4;       // wanted at least
constexpr std::int64_t kSpan = 1024;              // keys of a span on average, at least about
constexpr std::int64_t kStreamBytes = 4ll << 20;  // of all streams of a worker, about
constexpr std::int64_t kPartBytes = 16ll << 20;   // of the parts of all rows and spans at most

Refusal refuse(const IndexTopkArgs& a) {
  Refusal refusal = refuse_scorer(ScorerInputs::of(a));
  if (refusal.empty() && !(has_unit_stride(a.topk_indices) && has_unit_stride(a.topk_scores))) {
    refusal = "topk_indices and topk_scores must have stride 1 on their last axis";
  }
  return refusal;
}

// Span s of at most `spans` of the keys in `all`: from 3/2 down to 1/2 of the average. Empty after
// the last.
RowRange span_of(RowRange all, std::int64_t spans, std::int64_t s) {
  const std::int64_t n = min64(spans, ceil_div(all.length(), kSpan));
  auto begin = [&](std::int64_t i) {
    if (i >= n) return all.end;
    return all.start + all.length() * i * (3 * n - i) / (2 * n * n) / kPanel * kPanel;
  };
  return {begin(s), begin(s + 1)};
}
// No span is longer.
std::int64_t longest_span(std::int64_t keys, std::int64_t spans) {
  return max64(kSpan, ceil_div(keys, spans)) * 3 / 2 + kPanel;
}

// Scratch of one worker: the scorer's and the streams of its rows.
struct Scratch {
  ScorerScratch scorer;
  StreamScratch streams;

  Scratch(Carve& carve, const ScorerPlan& plan, std::int64_t k)
      : scorer(carve, plan), streams(carve, plan.rows, k, 0) {}
};

// Of each row, where it is cut into spans, a key (order_key) that k of its scores reach.
struct Floors {
  std::int32_t* key;

  Floors(Carve& carve, std::int64_t rows) : key(carve.take<std::int32_t>(rows)) {}
  void raise(std::int64_t row, std::int32_t to) const {
    std::int32_t now = of(row);
    while (now < to && !__atomic_compare_exchange_n(key + row, &now, to, true, __ATOMIC_RELAXED,
                                                    __ATOMIC_RELAXED)) {
    }
  }
  std::int32_t of(std::int64_t row) const { return __atomic_load_n(key + row, __ATOMIC_RELAXED); }
};

struct Plan {
  ScorerInputs in;
  std::int64_t rows, k;
  ScorerPlan scorer;
  std::int64_t row_blocks = 0, spans = 0, workers = 0;

  explicit Plan(const IndexTopkArgs& a)
      : in(ScorerInputs::of(a)),
        rows(a.index_query.shape[0]),
        k(max64(1, min64(a.topk_indices.shape[1], a.index_key.keys()))),
        scorer(in, 1) {
    lay_out(kStreamBytes, kPartBytes);
    const std::int64_t budget = a.workspace_budget;
    if (budget == 0 || bytes() <= budget) return;
    const std::int64_t share = max64(0, budget - shared_bytes()) / max64(1, workers);
    lay_out(min64(kStreamBytes, max64(0, share - scorer_bytes())), kPartBytes);
    employ(budget);
    if (bytes() <= budget) return;
    lay_out(0, 0);
    employ(budget);
  }

  std::int64_t worker_bytes() const {
    Carve carve(nullptr);
    Scratch(carve, scorer, k);
    return carve.used();
  }
  std::int64_t bytes() const { return shared_bytes() + workers * worker_bytes(); }

  Parts parts(Carve& carve) const {
    return {carve, rows, spans, min64(k, longest_span(in.key.keys(), spans))};
  }
  Floors floors(Carve& carve) const { return {carve, spans > 1 ? rows : 0}; }
  // What rows [first, first + count) see, together.
  RowRange seen(std::int64_t first, std::int64_t count) const {
    RowRange all;
    for (std::int64_t row = first; row < first + count; ++row) {
      const RowRange one = in.range(row);
      if (one.length() == 0) continue;
      if (all.length() == 0) all = one;
      all = {min64(all.start, one.start), max64(all.end, one.end)};
    }
    return all;
  }

 private:
  // Tasks of as many rows as have their streams in `stream_bytes`, of one at least; of so many
  // spans that threads have enough of them, if the parts fit `part_bytes`.
  void lay_out(std::int64_t stream_bytes, std::int64_t part_bytes) {
    const RowChunks chunks =
        row_chunks(ScorerPlan::kMaxRows, TopkStream::array_length(k), DType::kF32, stream_bytes);
    scorer = ScorerPlan(in, chunks.rows);
    row_blocks = ceil_div(rows, scorer.rows);
    const std::int64_t threads = num_threads();
    const std::int64_t tasks = threads > 1 ? kTasksPerThread * threads : 1;
    spans = ceil_div(tasks, max64(1, row_blocks));
    spans = min64(spans, ceil_div(in.key.keys(), kSpan));
    spans = max64(1, min64(spans, part_bytes / max64(1, rows * Parts::bytes_of_one(k))));
    workers = min64(row_blocks * spans, threads);
  }
  // No more workers than fit.
  void employ(std::int64_t budget) {
    const std::int64_t fitting = (budget - shared_bytes()) / worker_bytes();
    workers = max64(min64(1, workers), min64(workers, fitting));
  }
  std::int64_t scorer_bytes() const {
    Carve carve(nullptr);
    ScorerScratch(carve, scorer);
    return carve.used();
  }
  std::int64_t shared_bytes() const {
    Carve carve(nullptr);
    parts(carve);
    floors(carve);
    return carve.bytes_to_ask();
  }
};

std::int64_t workspace_bytes(const IndexTopkArgs& a) { return Plan(a).bytes(); }

void run(const IndexTopkArgs& a, Workspace workspace) {
  const Plan plan(a);
  const ScorerInputs& in = plan.in;
  const std::int64_t own_bytes = plan.worker_bytes();
  Carve carve(workspace.data);
  const Parts parts = plan.parts(carve);
  const Floors floors = plan.floors(carve);
  for (std::int64_t row = 0; plan.spans > 1 && row < plan.rows; ++row) floors.key[row] = kLowest;
  auto* scratch_of_workers = carve.take<unsigned char>(own_bytes * plan.workers);
  auto scratch_of = [&](std::int64_t worker) {
    Carve own(scratch_of_workers + worker * own_bytes);
    return Scratch(own, plan.scorer, plan.k);
  };
  auto output = [&](std::int64_t row) {
    return row_of(a.topk_indices, a.topk_lengths, a.topk_scores, row);
  };
  auto kept = [&](std::int64_t row) { return KeptKeys(in.range(row), a.keep_first, a.keep_last); };

  parallel_lanes(
      plan.row_blocks * plan.spans, plan.workers, [&](std::int64_t task, std::int64_t worker) {
        const std::int64_t s = task / plan.row_blocks;
        const std::int64_t first_row = task % plan.row_blocks * plan.scorer.rows;
        const std::int64_t row_count = min64(plan.scorer.rows, plan.rows - first_row);
        const RowRange span = span_of(plan.seen(first_row, row_count), plan.spans, s);
        const Scratch scratch = scratch_of(worker);
        RowRange visible[ScorerPlan::kMaxRows];
        KeptKeys keep[ScorerPlan::kMaxRows];
        TopkStream stream[ScorerPlan::kMaxRows];
        for (std::int64_t r = 0; r < row_count; ++r) {
          visible[r] = in.range(first_row + r);
          if (plan.spans > 1) visible[r] = overlap(visible[r], span);
          keep[r] = kept(first_row + r);
          scratch.streams.start(stream[r], r, a.keep_minus_inf);
          if (plan.spans > 1) stream[r].raise(floors.of(first_row + r));
        }
        score_rows(in, plan.scorer, scratch.scorer, first_row, row_count, visible,
                   [&](std::int64_t r, std::int64_t key, std::int64_t n, const float* scores) {
                     const RowRange rest = overlap(keep[r].rest(), {key, key + n});
                     if (rest.length() < n) keep[r].put(scores, n, key, output(first_row + r));
                     if (rest.length() == 0) return;
                     stream[r].push(scores + (rest.start - key), rest.length(), rest.start);
                   });
        for (std::int64_t r = 0; r < row_count; ++r) {
          if (plan.spans > 1) {
            parts.put(first_row + r, s, stream[r]);
            if (parts.k == plan.k) floors.raise(first_row + r, stream[r].reached_key());
          } else {
            keep[r].write(stream[r], output(first_row + r));
          }
        }
      });
  if (plan.spans > 1) {
    parallel_lanes(plan.rows, plan.workers, [&](std::int64_t row, std::int64_t worker) {
      const Scratch scratch = scratch_of(worker);
      TopkStream stream;
      scratch.streams.start(stream, 0, a.keep_minus_inf);
      stream.raise(floors.of(row));
      parts.merge(row, stream);
      kept(row).write(stream, output(row));
    });
  }
  note_selection({plan.rows, plan.spans, 0});
}

}  // namespace

extern const Implementation<IndexTopkArgs> index_topk_implementation;
const Implementation<IndexTopkArgs> index_topk_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                                 workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
