// sparse_attention_backward on a CPU, in two phases over chunks of rows. attention.h says what a
// run is.
//
// Phase 1, parallel over runs: sparse_attention_backward_rows.h. p = exp(logit - lse), delta = sum
// p dp, dz = p (dp - delta) scale; d_query; dz and p of all slots are kept for the chunk.
// Phase 2, parallel over owners of key ranges: sparse_attention_backward_keys.h.
//
// delta comes from p and dp, as the contract defines it, not from d_output . output, which is the
// same number only if output was not rounded: with bf16 outputs that would cost 2^-9 of
// |d_output| |output|, far more than all sums here. The price is a second pass over the keys of a
// row, which are in cache.
//
// Order: dot products are FMA chains over channels; delta = 8 lane chains (slots i, i + 8, ...) and
// a fixed tree; d_query an FMA chain over slots. Chunks, runs and threads leave no trace.
//
// Bound by the FMA pipes: 2 (3 dim_qk + 2 dim_v) FLOPs per pair and slot, 2.53 times the forward's
// at 576/512. With 64 heads the products run at the forward's rate; an eighth of the time is the
// rest: exponentials and turning the weights, keys copied twice, zeros for d_key. What was tried
// there and gave nothing: chunks of 8 MiB; no zeroing, where the first addition to a key starts
// from zeros (its lines then come from memory in the middle of the products, even if prefetched a
// run ahead); operands of two columns of d_key at a time in L1. With 4 heads, 80/64, and 128 slots,
// a key's gradient is read and written back for 8 products.
#include "winnow/sparse_attention_backward.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/owners.h"
#include "cpu/sparse_attention_backward_keys.h"
#include "cpu/sparse_attention_backward_rows.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

using Args = SparseAttentionBackwardArgs;

// What a chunk keeps stays near the caches: this much per thread and once more. Yet there is room
// for one run of any size per thread, as long as these do not exceed the second number.
constexpr std::int64_t kChunkFloats = 1 << 18;
constexpr std::int64_t kMostFloats = 1 << 26;
constexpr std::int64_t kChunkRows = 2048;
constexpr std::int64_t kDenseRange = 96;  // keys of an owner without lists: 16 tiles of 6

AttentionShape shape_of(const Args& a) {
  return AttentionShape(a.query, a.key, a.topk_indices, a.d_output.shape[2]);
}

// Keys of one owner. With lists: some 32 slots of a row per owner, as an owner reads all of a
// row's operands; yet at least 16 owners, to share the work between.
std::int64_t range_keys(const AttentionShape& shape) {
  if (shape.dense) return kDenseRange;
  return max64(16, ceil_div(shape.keys, max64(16, shape.topk / 32)));
}

// Floats that a run of `pairs` pairs over at most `slots` slots keeps for the chunk.
std::int64_t run_floats(const AttentionShape& shape, std::int64_t pairs, std::int64_t slots) {
  return shape.kv_heads * pairs *
         (2 * slots_held(slots) + kPanel * (shape.key_panels() + shape.value_panels()));
}

// The whole workspace: what the chunk keeps, then what each worker needs.
struct Memory {
  std::int64_t chunk_rows, floats, owners;
  BackwardRun* runs;
  std::int32_t *visible, *ids, *order, *buckets;
  float* pool;
  char* workers;
  std::int64_t bytes;
  Memory(const AttentionShape& shape, std::int64_t worker_bytes, void* memory)
      : owners(ceil_div(shape.keys, range_keys(shape))) {
    const std::int64_t most = shape.dense ? shape.keys : shape.topk;
    const std::int64_t runs_in_all = ceil_div(shape.rows, shape.run_rows);
    const std::int64_t largest = run_floats(shape, shape.pairs, most);
    floats = max64(kChunkFloats * (num_threads() + 1), min64(kMostFloats, num_threads() * largest));
    floats = max64(largest, min64(floats, runs_in_all * largest));
    chunk_rows = min64(shape.rows, kChunkRows);
    if (!shape.dense) chunk_rows = max64(1, min64(chunk_rows, floats / largest));
    const std::int64_t listed = shape.dense ? 0 : chunk_rows;
    Carve carve(memory);
    runs = carve.take<BackwardRun>(chunk_rows);
    visible = carve.take<std::int32_t>(chunk_rows);
    ids = carve.take<std::int32_t>(listed * shape.topk);
    order = carve.take<std::int32_t>(listed * shape.topk);
    buckets = carve.take<std::int32_t>(listed * (owners + 1));
    pool = carve.take<float>(floats);
    workers = carve.take<char>(num_threads() * worker_bytes);
    bytes = carve.bytes_to_ask();
  }
};

// The slots of one row, and which owner each belongs to.
void list_slots(const Args& a, const AttentionShape& shape, const Memory& m, std::int64_t row,
                std::int64_t at) {
  std::int32_t* ids = m.ids + at * shape.topk;
  const RowRange range = row_range(a.starts, a.ends, row, shape.keys);
  const std::int64_t count =
      keep_slots(a.topk_indices, row, 0, list_length(a.topk_indices, a.topk_lengths, row), range,
                 nullptr, ids);
  m.visible[at] = static_cast<std::int32_t>(count);
  order_by_owner(ids, count, range_keys(shape), m.owners, m.buckets + at * (m.owners + 1),
                 m.order + at * shape.topk);
}

// Cuts rows from `row` on into the runs of one chunk. Returns how many.
std::int64_t make_runs(const Args& a, const AttentionShape& shape, const Memory& m,
                       std::int64_t row) {
  std::int64_t runs = 0, rows = 0, used = 0;
  while (row + rows < shape.rows && rows < m.chunk_rows) {
    BackwardRun& run = m.runs[runs];
    run = {};
    run.row = row + rows;
    run.rows = 1;
    run.visible = m.visible + rows;
    std::int64_t slots = shape.topk;
    if (shape.dense) {
      const std::int64_t most =
          min64(shape.run_rows, min64(shape.rows - run.row, m.chunk_rows - rows));
      run.rows = dense_run(a.starts, a.ends, shape.keys, run.row, static_cast<int>(most),
                           m.visible + rows, run.slots);
      slots = run.slots.count;
    } else {
      run.slots.ids = m.ids + rows * shape.topk;
      run.order = m.order + rows * shape.topk;
      run.buckets = m.buckets + rows * (m.owners + 1);
    }
    run.pairs = run.rows * shape.group;
    run.held = slots_held(slots);
    const std::int64_t need = run_floats(shape, run.pairs, slots);
    if (used + need > m.floats) break;
    run.weights = m.pool + used;
    run.operands = run.weights + shape.kv_heads * run.weights_per_head();
    used += need;
    rows += run.rows;
    ++runs;
  }
  return runs;
}

Target target_of(const Tensor& t, std::int64_t g) {
  return {t.as<float>() + g * t.strides[1], t.strides[0], t.shape[2]};
}

void zero_rows(const Target& target, std::int64_t first, std::int64_t last) {
  for (std::int64_t j = first; j < last; ++j) {
    for (std::int64_t c = 0; c < target.channels; ++c) target.data[j * target.stride + c] = 0;
  }
}

template <class T, class Out>
void run_typed(const Args& a, Workspace workspace) {
  const AttentionShape shape = shape_of(a);
  const std::int64_t worker_bytes = RowBuffers(shape, nullptr).bytes;
  const Memory m(shape, worker_bytes, workspace.data);
  const std::int64_t size = range_keys(shape), heads = shape.kv_heads;
  // work(g, owner, first key, end of keys, targets)
  auto for_each_owner = [&](auto&& work) {
    parallel_for(m.owners * heads, [&](std::int64_t task, int) {
      const std::int64_t g = task % heads, owner = task / heads, first = owner * size;
      const Target d_key = target_of(a.d_key, g);
      if (a.value.empty()) {
        work(g, owner, first, min64(shape.keys, first + size), d_key, nullptr);
      } else {
        const Target d_value = target_of(a.d_value, g);
        work(g, owner, first, min64(shape.keys, first + size), d_key, &d_value);
      }
    });
  };
  std::int64_t row = 0;
  do {
    const std::int64_t runs = make_runs(a, shape, m, row);
    if (!shape.dense) {
      parallel_for(runs, [&](std::int64_t i, int) {
        list_slots(a, shape, m, row + i, i);
        m.runs[i].slots.count = m.visible[i];
      });
    }
    parallel_for(runs * heads, [&](std::int64_t task, int worker) {
      const RowBuffers b(shape, m.workers + worker * worker_bytes);
      differentiate_run<T, Out>(a, shape, b, m.runs[task / heads], task % heads);
    });
    for_each_owner([&](std::int64_t g, std::int64_t owner, std::int64_t first, std::int64_t last,
                       const Target& d_key, const Target* d_value) {
      if (row == 0) {
        zero_rows(d_key, first, last);
        if (d_value != nullptr) zero_rows(*d_value, first, last);
      }
      for (std::int64_t i = 0; i < runs; ++i)
        add_run(shape, m.runs[i], g, d_key, d_value, owner, first, last);
    });
    for (std::int64_t i = 0; i < runs; ++i) row += m.runs[i].rows;
  } while (row < shape.rows);
}

Refusal refuse(const Args& a) {
  const AttentionShape s = shape_of(a);
  Refusal refusal = refuse_uncountable(s.pairs * s.kv_heads,
                                       2 * (s.dense ? s.keys : s.topk) + s.dim_qk + s.dim_v);
  if (!refusal.empty()) return refusal;
  return refuse_layout(a.query,
                       {a.query, a.key, a.value, a.d_output, a.d_query, a.d_key, a.d_value});
}

std::int64_t workspace_bytes(const Args& a) {
  const AttentionShape shape = shape_of(a);
  return Memory(shape, RowBuffers(shape, nullptr).bytes, nullptr).bytes;
}

void run(const Args& a, Workspace workspace) {
  with_element(a.query.dtype, [&]<class T>(const T*) {
    if (a.d_output.dtype == DType::kF32) {
      run_typed<T, float>(a, workspace);
    } else {
      run_typed<T, T>(a, workspace);
    }
  });
}

}  // namespace

extern const Implementation<Args> sparse_attention_backward_implementation;
const Implementation<Args> sparse_attention_backward_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
