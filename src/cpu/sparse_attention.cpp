// sparse_attention on a CPU: a run of rows over its slots with the online softmax, 64 slots at a
// time. attention.h says what a run is.
//
// Per block: 16 gathered keys are transposed into a panel [dim_qk][16], all pairs run against it in
// tiles of 6 x 16; values are copied into panels [dim_v / 16][64][16] while the rows are warm.
// After the softmax of the block each value panel (4 KiB, L1) takes all pairs, with sum * factor
// carried through the registers. The rows of the next block are prefetched between FMAs.
//
// Order: logit = FMA chain over channels, times scale; block maximum exact; block sum = 8 lane
// chains (slots i, i + 8, ...), then a fixed tree; sum * exp(old - new maximum), then an FMA chain
// over the slots of the block. No finite number stands for -inf.
//
// Bound by the FMA pipes: 2 (dim_qk + dim_v) FLOPs per pair and slot; a gathered element is read
// once and serves all heads of its key head. Measured on one core of a busy Zen 3, where the bare
// tile runs at 87 to 93 GFLOP/s: 64 heads, 576/512, 2048 gathered slots 60 to 64; 4 heads, 80/64,
// without lists 44, with 128 slots 20 to 25: four heads do not pay for the transposition of a
// gathered key.
#include "winnow/sparse_attention.h"

#include "base/cpu_features.h"
#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/attention.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

using Shape = AttentionShape;

Shape shape_of(const SparseAttentionArgs& a) {
  return Shape(a.query, a.key, a.topk_indices, a.output.shape[2]);
}

// What one worker needs.
struct Buffers {
  float *query, *panel, *scores, *values, *sums, *maximum, *total, *factor;
  std::int32_t *visible, *row_visible, *ids;
  std::int64_t bytes;
  Buffers(const Shape& s, void* memory) {
    Carve carve(memory);
    query = carve.take<float>(s.pairs * s.dim_qk + kTileSlack);
    panel = carve.take<float>(s.dim_qk * kPanel);
    scores = carve.take<float>(s.pairs * kSlotBlock);
    values = carve.take<float>(s.value_panels() * kSlotBlock * kPanel);
    sums = carve.take<float>(s.value_panels() * s.pairs * kPanel);
    maximum = carve.take<float>(s.pairs);
    total = carve.take<float>(s.pairs);
    factor = carve.take<float>(s.pairs);
    visible = carve.take<std::int32_t>(s.pairs);
    row_visible = carve.take<std::int32_t>(s.run_rows);
    ids = carve.take<std::int32_t>(s.topk);
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
void finish(const SparseAttentionArgs& a, const Shape& shape, const Buffers& b, std::int64_t row,
            int pairs, std::int64_t head) {
  const PairRows<Out> output(a.output, row, head, shape.group);
  const PairRows<float> lse(a.lse, row, head, shape.group);
  for (int p = 0; p < pairs; ++p) {
    const float total = b.total[p];
    *lse[p] = total == 0 ? -kInfinity : b.maximum[p] + __builtin_logf(total);
    const Wide inverse = splat16(1 / total);
    for (std::int64_t c = 0; c < shape.dim_v; c += kPanel) {
      const float* sum = b.sums + (c / kPanel * pairs + p) * kPanel;
      store_columns(output[p] + c, shape.dim_v - c,
                    total == 0 ? zero16() : multiply(inverse, load16(sum)));
    }
  }
}

template <class T>
void attend(const SparseAttentionArgs& a, const Shape& shape, const Buffers& b, std::int64_t row,
            int rows, std::int64_t g, const Slots& slots) {
  const int pairs = rows * shape.group;
  const std::int64_t head = g * shape.group;
  const Tiles tiles(pairs);
  const KeyRows<T> keys(a.key, g), values(a.value.empty() ? a.key : a.value, g);
  const bool shared = a.value.empty();
  const float scale = static_cast<float>(a.softmax_scale);
  pack_pairs(PairRows<const T>(a.query, row, head, shape.group), tiles, shape.dim_qk, b.query);
  for (int p = 0; p < pairs; ++p) {
    b.visible[p] = b.row_visible[p / shape.group];
    b.maximum[p] = -kInfinity;
    b.total[p] = 0;
  }
  for (std::int64_t i = 0; i < shape.value_panels() * pairs * kPanel; ++i) b.sums[i] = 0;

  for (std::int64_t s = 0; s < slots.count; s += kSlotBlock) {
    const std::int64_t n = min64(kSlotBlock, slots.count - s);
    for (std::int64_t p = 0; p < n; p += kPanel) {
      pack_slots(keys, slots, s + p, shape.dim_qk, b.panel);
      copy_slots(values, slots, s + p, min64(kPanel, n - p), shape.dim_v, b.values + p * kPanel);
      Prefetcher ahead =
          rows_ahead(keys, slots, p + kPanel < n ? s + p + kPanel : slots.count, shape.dim_qk);
      dot_pairs(b.query, tiles, b.visible, s + p, shape.dim_qk, b.panel, b.scores + p, kSlotBlock,
                ahead, 2 + static_cast<int>(sizeof(T)) / 4);
    }
    for (int p = 0; p < pairs; ++p) {
      b.factor[p] = 1;
      if (b.visible[p] <= s) continue;
      soften(b.scores + p * kSlotBlock, min64(kSlotBlock, b.visible[p] - s), scale, b.maximum[p],
             b.total[p], b.factor[p]);
    }
    Prefetcher ahead = rows_ahead(keys, slots, s + kSlotBlock, shape.dim_qk);
    if (!shared) ahead = rows_ahead(values, slots, s + kSlotBlock, shape.dim_v);
    add_weighted(b.scores, kSlotBlock, tiles, pairs, b.visible, s, b.factor, b.values, shape.dim_v,
                 b.sums, ahead);
  }

  if (a.output.dtype == DType::kF32) {
    finish<float>(a, shape, b, row, pairs, head);
  } else {
    finish<T>(a, shape, b, row, pairs, head);
  }
}

template <class T>
void run_typed(const SparseAttentionArgs& a, Workspace workspace) {
  const Shape shape = shape_of(a);
  const std::int64_t bytes = Buffers(shape, nullptr).bytes;
  Carve carve(workspace.data);
  char* memory = carve.take<char>(num_threads() * bytes);
  // A task is `run_rows` rows of one key head; rows of different starts in it are different runs.
  parallel_for(
      ceil_div(shape.rows, shape.run_rows) * shape.kv_heads, [&](std::int64_t task, int worker) {
        const Buffers b(shape, memory + worker * bytes);
        std::int64_t row = task / shape.kv_heads * shape.run_rows;
        const std::int64_t end = min64(shape.rows, row + shape.run_rows);
        while (row < end) {
          Slots slots;
          int rows = 1;
          if (shape.dense) {
            rows = dense_run(a.starts, a.ends, shape.keys, row, static_cast<int>(end - row),
                             b.row_visible, slots);
          } else {
            const RowRange range = row_range(a.starts, a.ends, row, shape.keys);
            slots.ids = b.ids;
            slots.count =
                keep_slots(a.topk_indices, row, 0, list_length(a.topk_indices, a.topk_lengths, row),
                           range, nullptr, b.ids);
            b.row_visible[0] = static_cast<std::int32_t>(slots.count);
          }
          attend<T>(a, shape, b, row, rows, task % shape.kv_heads, slots);
          row += rows;
        }
      });
}

Refusal refuse(const SparseAttentionArgs& a) {
  if (Refusal why = refuse_instruction_set(WINNOW_STRING(WINNOW_ISA)); !why.empty()) return why;
  return refuse_layout(a.query, {a.query, a.key, a.value, a.output});
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
