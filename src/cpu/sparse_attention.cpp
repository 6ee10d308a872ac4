// sparse_attention on a CPU: a run of rows over its slots with the online softmax, 64 slots at a
// time. attention.h says what a run is.
//
// Per block: 16 gathered keys are transposed into a panel [dim_qk][16], all pairs run against it in
// tiles of 6 x 16; values are copied into panels [dim_v / 16][64][16] while the rows are warm.
// After the softmax of the block each value panel (4 KiB, L1) takes all pairs, with sum * factor
// carried through the registers. The rows of the next block are prefetched between FMAs.
//
// Slots are cut into spans of 512, whose partial softmaxes are merged in order; where there are
// fewer runs than threads, the spans of a run are shared between the threads. A span is a place in
// a row's slots, so neither the threads nor the other rows leave a trace.
//
// Order: logit = FMA chain over channels, times scale; block maximum exact; block sum = 8 lane
// chains (slots i, i + 8, ...), then a fixed tree; sum * exp(old - new maximum), then an FMA chain
// over the slots of the block. Spans: old * exp(old - new maximum) + span * exp(..). No finite
// number stands for -inf.
//
// Bound by the FMA pipes: 2 (dim_qk + dim_v) FLOPs per pair and slot; a gathered element is read
// once and serves all heads of its key head. Measured on one core of a busy Zen 3, where the bare
// tile runs at 87 to 93 GFLOP/s: 64 heads, 576/512, 2048 gathered slots 60 to 64; 4 heads, 80/64,
// without lists 44, with 128 slots 20 to 25: four heads do not pay for the transposition of a
// gathered key.
#include "winnow/sparse_attention.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/attention.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr std::int64_t kSpan = 8 * kSlotBlock;

using Shape = AttentionShape;

Shape shape_of(const SparseAttentionArgs& a) {
  return Shape(a.query, a.key, a.topk_indices, a.output.shape[2]);
}

// The softmax of a run over some of its slots, not normalised.
struct Partial {
  float *sums, *maximum, *total;  // [dim_v / 16][pairs][16], [pairs], [pairs]
  Partial(Carve& carve, const Shape& s)
      : sums(carve.take<float>(s.value_panels() * s.pairs * kPanel)),
        maximum(carve.take<float>(s.pairs)),
        total(carve.take<float>(s.pairs)) {}
};

// What one worker needs.
struct Buffers {
  Carve carve;
  Partial all, span;
  float *query, *panel, *scores, *values, *factor;
  std::int32_t *visible, *row_visible, *ids;
  std::int64_t bytes;
  Buffers(const Shape& s, void* memory) : carve(memory), all(carve, s), span(carve, s) {
    query = carve.take<float>(s.pairs * s.dim_qk + kTileSlack);
    panel = carve.take<float>(s.dim_qk * kPanel);
    scores = carve.take<float>(s.pairs * kSlotBlock);
    values = carve.take<float>(s.value_panels() * kValuePanel);
    factor = carve.take<float>(s.pairs);
    visible = carve.take<std::int32_t>(s.pairs);
    row_visible = carve.take<std::int32_t>(s.run_rows);
    ids = carve.take<std::int32_t>(s.dense ? 0 : s.topk > 0 ? s.topk : s.keys);
    bytes = carve.used();
  }
};

// The softmax of one pair over `n` (1 to 64) scores of a block: weights in place, and what the sums
// so far must be multiplied with.
void soften(float* x, std::int64_t n, float scale, float& maximum, float& total, float& factor) {
  const F8 minus_inf = splat(-kInfinity), scales = splat(scale);
  for (std::int64_t i = n / 8 * 8; i < kSlotBlock; i += 8) {  // slots that the pair does not see
    const I8 seen = splat(static_cast<std::int32_t>(n - i)) > iota8();
    store(x + i, seen ? load(x + i) : minus_inf);
  }
  F8 most = load(x);
  for (std::int64_t i = 8; i < kSlotBlock; i += 8) most = max8(most, load(x + i));
  const float block_maximum = maximum8(scales * most);
  const float next = block_maximum > maximum ? block_maximum : maximum;
  const float base = next == -kInfinity ? 0 : next;  // no weight yet
  F8 sum = zero8();
  for (std::int64_t i = 0; i < kSlotBlock; i += 8) {
    const F8 e = exp8(scales * load(x + i) - splat(base));
    store(x + i, e);
    sum = sum + e;
  }
  factor = exp8(splat(maximum - base))[0];
  total = fma(total, factor, sum8(sum));
  maximum = next;
}

// Normalises and stores.
template <class Out>
void finish(const SparseAttentionArgs& a, const Shape& shape, const Partial& all, std::int64_t row,
            int pairs, std::int64_t head) {
  const PairRows<Out> output(a.output, row, head, shape.group);
  const PairRows<float> lse(a.lse, row, head, shape.group);
  for (int p = 0; p < pairs; ++p) {
    const float total = all.total[p];
    *lse[p] = total == 0 ? -kInfinity : all.maximum[p] + __builtin_logf(total);
    const Wide inverse = splat16(1 / total);
    for (std::int64_t c = 0; c < shape.dim_v; c += kPanel) {
      const float* sum = all.sums + (c / kPanel * pairs + p) * kPanel;
      store_columns(output[p] + c, shape.dim_v - c,
                    total == 0 ? zero16() : multiply(inverse, load16(sum)));
    }
  }
}

// Rows of one list of slots; row r sees the first visible[r] of them.
struct RunOfRows {
  std::int64_t row, head;
  int rows, pairs;
  Slots slots;
  const std::int32_t* visible;
};

// Slots [first, last) of a run.
template <class T>
void attend_span(const SparseAttentionArgs& a, const Shape& shape, const Buffers& b,
                 const RunOfRows& run, std::int64_t first, std::int64_t last, const Partial& out) {
  const Tiles tiles(run.pairs);
  const std::int64_t g = run.head / shape.group;
  const Slots& slots = run.slots;
  const KeyRows<T> keys(a.key, a.key.data, g);
  const KeyRows<T> values(a.key, a.value.empty() ? a.key.data : a.value, g);
  const bool shared = a.value.empty();
  const float scale = static_cast<float>(a.softmax_scale);
  for (int p = 0; p < run.pairs; ++p) {
    b.visible[p] = run.visible[p / shape.group];
    out.maximum[p] = -kInfinity;
    out.total[p] = 0;
  }
  for (std::int64_t i = 0; i < shape.value_panels() * run.pairs * kPanel; ++i) out.sums[i] = 0;

  for (std::int64_t s = first; s < last; s += kSlotBlock) {
    const std::int64_t n = min64(kSlotBlock, last - s);
    for (std::int64_t p = 0; p < n; p += kPanel) {
      pack_slots(keys, slots, s + p, shape.dim_qk, b.panel);
      copy_slots(values, slots, s + p, min64(kPanel, n - p), shape.dim_v, b.values + p * kPanel);
      Prefetcher ahead =
          rows_ahead(keys, slots, p + kPanel < n ? s + p + kPanel : slots.count, shape.dim_qk);
      dot_pairs(b.query, tiles, b.visible, s + p, shape.dim_qk, b.panel, b.scores + p, kSlotBlock,
                ahead, 2 + static_cast<int>(sizeof(T)) / 4);
    }
    for (int p = 0; p < run.pairs; ++p) {
      b.factor[p] = 1;
      if (b.visible[p] <= s) continue;
      soften(b.scores + p * kSlotBlock, min64(kSlotBlock, b.visible[p] - s), scale, out.maximum[p],
             out.total[p], b.factor[p]);
    }
    Prefetcher ahead = rows_ahead(keys, slots, s + kSlotBlock, shape.dim_qk);
    if (!shared) ahead = rows_ahead(values, slots, s + kSlotBlock, shape.dim_v);
    add_weighted(b.scores, kSlotBlock, tiles, run.pairs, b.visible, s, b.factor, b.values,
                 shape.dim_v, out.sums, ahead, 2);
  }
}

// Adds the span that begins with slot `first` to the spans before it. What the span had of maximum
// and total is used up: they hold the factors of old and new.
void merge_span(const Shape& shape, const RunOfRows& run, std::int64_t first, const Partial& span,
                const Partial& all) {
  for (int p = 0; p < run.pairs; ++p) {
    if (run.visible[p / shape.group] <= first) continue;
    const float next = span.maximum[p] > all.maximum[p] ? span.maximum[p] : all.maximum[p];
    const float base = next == -kInfinity ? 0 : next;
    const float before = exp8(splat(all.maximum[p] - base))[0];
    const float factor = exp8(splat(span.maximum[p] - base))[0];
    all.maximum[p] = next;
    all.total[p] = fma(all.total[p], before, span.total[p] * factor);
    span.maximum[p] = before;
    span.total[p] = factor;
  }
  for (std::int64_t c = 0; c < shape.value_panels(); ++c) {
    for (int p = 0; p < run.pairs; ++p) {
      if (run.visible[p / shape.group] <= first) continue;
      const std::int64_t at = (c * run.pairs + p) * kPanel;
      store(all.sums + at, fma(splat16(span.maximum[p]), load16(all.sums + at),
                               multiply(splat16(span.total[p]), load16(span.sums + at))));
    }
  }
}

template <class T>
void finish_run(const SparseAttentionArgs& a, const Shape& shape, const Partial& all,
                const RunOfRows& run) {
  if (a.output.dtype == DType::kF32) {
    finish<float>(a, shape, all, run.row, run.pairs, run.head);
  } else {
    finish<T>(a, shape, all, run.row, run.pairs, run.head);
  }
}

template <class T>
void pack_queries(const SparseAttentionArgs& a, const Shape& shape, const RunOfRows& run,
                  const Buffers& b) {
  pack_pairs(PairRows<const T>(a.query, run.row, run.head, shape.group), Tiles(run.pairs),
             shape.dim_qk, b.query);
}

// A run on one thread.
template <class T>
void attend(const SparseAttentionArgs& a, const Shape& shape, const Buffers& b,
            const RunOfRows& run) {
  pack_queries<T>(a, shape, run, b);
  attend_span<T>(a, shape, b, run, 0, min64(kSpan, run.slots.count), b.all);
  for (std::int64_t s = kSpan; s < run.slots.count; s += kSpan) {
    attend_span<T>(a, shape, b, run, s, min64(s + kSpan, run.slots.count), b.span);
    merge_span(shape, run, s, b.span, b.all);
  }
  finish_run<T>(a, shape, b.all, run);
}

// A run on all threads: a span for each at a time. `memory`: the buffers of the threads.
template <class T>
void attend_together(const SparseAttentionArgs& a, const Shape& shape, char* memory,
                     std::int64_t bytes, const RunOfRows& run) {
  const std::int64_t spans = ceil_div(run.slots.count, kSpan), window = num_threads();
  const Partial all = Buffers(shape, memory).all;
  for (std::int64_t begin = 0; begin < max64(spans, 1); begin += window) {
    const std::int64_t end = max64(min64(spans, begin + window), 1);
    parallel_for(end - begin, [&](std::int64_t n, int) {
      const Buffers b(shape, memory + n * bytes);
      const std::int64_t first = (begin + n) * kSpan;
      if (begin == 0) pack_queries<T>(a, shape, run, b);
      attend_span<T>(a, shape, b, run, first, min64(first + kSpan, run.slots.count),
                     first == 0 ? b.all : b.span);
    });
    for (std::int64_t n = begin == 0 ? 1 : 0; n < end - begin; ++n)
      merge_span(shape, run, (begin + n) * kSpan, Buffers(shape, memory + n * bytes).span, all);
  }
  finish_run<T>(a, shape, all, run);
}

// The keys of one row that is a run of its own.
std::int64_t list_slots(const SparseAttentionArgs& a, const Shape& shape, std::int64_t row,
                        std::int32_t* ids) {
  const RowRange range = row_range(a.starts, a.ends, row, shape.keys);
  std::int64_t count = 0;
  if (a.topk_indices.empty()) {
    for (std::int64_t j = range.start; j < range.end; ++j)
      ids[count++] = static_cast<std::int32_t>(j);
  } else {
    count = keep_slots(a.topk_indices, row, 0, list_length(a.topk_indices, a.topk_lengths, row),
                       range, nullptr, ids);
  }
  return a.key.paged() ? place_slots(a.key, row, count, ids) : count;
}

template <class T>
void run_typed(const SparseAttentionArgs& a, Workspace workspace) {
  const Shape shape = shape_of(a);
  const std::int64_t bytes = Buffers(shape, nullptr).bytes;
  Carve carve(workspace.data);
  char* memory = carve.take<char>(num_threads() * bytes);
  // A task is `run_rows` rows of one key head; rows of different starts in it are different runs.
  const std::int64_t tasks = ceil_div(shape.rows, shape.run_rows) * shape.kv_heads;
  // work(run) for the runs of a task, their lists in the buffers b.
  auto for_each_run = [&](std::int64_t task, const Buffers& b, auto&& work) {
    std::int64_t row = task / shape.kv_heads * shape.run_rows;
    const std::int64_t end = min64(shape.rows, row + shape.run_rows);
    while (row < end) {
      RunOfRows run = {row, task % shape.kv_heads * shape.group, 1, 0, {}, b.row_visible};
      if (shape.dense) {
        run.rows = dense_run(a.starts, a.ends, shape.keys, row, static_cast<int>(end - row),
                             b.row_visible, run.slots);
      } else {
        run.slots.ids = b.ids;
        run.slots.count = list_slots(a, shape, row, b.ids);
        b.row_visible[0] = static_cast<std::int32_t>(run.slots.count);
      }
      run.pairs = run.rows * shape.group;
      work(run);
      row += run.rows;
    }
  };
  if (tasks < num_threads()) {
    for (std::int64_t task = 0; task < tasks; ++task) {
      for_each_run(task, Buffers(shape, memory),
                   [&](const RunOfRows& run) { attend_together<T>(a, shape, memory, bytes, run); });
    }
    return;
  }
  parallel_for(tasks, [&](std::int64_t task, int worker) {
    const Buffers b(shape, memory + worker * bytes);
    for_each_run(task, b, [&](const RunOfRows& run) { attend<T>(a, shape, b, run); });
  });
}

Refusal refuse(const SparseAttentionArgs& a) {
  if (a.key.paged() && a.key.data.shape[0] * a.key.page_size() > INT32_MAX) {
    return "the pages must hold fewer than 2^31 keys in all";
  }
  return refuse_layout(a.query, {a.query, a.key.data, a.value, a.output});
}

std::int64_t workspace_bytes(const SparseAttentionArgs& a) {
  Carve carve(nullptr);
  carve.take<char>(num_threads() * Buffers(shape_of(a), nullptr).bytes);
  return carve.bytes_to_ask();
}

void run(const SparseAttentionArgs& a, Workspace workspace) {
  with_element(a.query.dtype, [&]<class T>(const T*) { run_typed<T>(a, workspace); });
}

}  // namespace

extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
const Implementation<SparseAttentionArgs> sparse_attention_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
