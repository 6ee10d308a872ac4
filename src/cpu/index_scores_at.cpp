// index_scores_at on CPUs: the scorer's panels, filled with gathered keys.
//
// Tasks: one row times 512 slots; the row's heads are packed once per task, 16 kept slots at a time
// become a panel. The order of both sums is score_panel's (scorer.h), so a score is bit for bit the
// one that index_scores gives. 2 * heads * dim FLOPs per slot against one gathered key: bound by
// the FMA units; the keys of the next panel are fetched meanwhile.
#include "winnow/index_scores_at.h"

#include "base/implementation.h"
#include "cpu/scorer.h"
#include "cpu/slots.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kSpan = 512;  // slots of a task

struct Worker {
  float *tiles, *weights, *panel;
  std::int32_t *slot, *id;

  Worker(Carve& carve, const IndexScoresAtArgs& a) {
    const std::int64_t heads = a.index_query.shape[1], dim = a.index_query.shape[2];
    tiles = carve.take<float>(heads * dim + kTileSlack);
    weights = carve.take<float>(heads);
    panel = carve.take<float>(dim * kPanel);
    slot = carve.take<std::int32_t>(kSpan);
    id = carve.take<std::int32_t>(kSpan);
  }
};

Refusal refuse(const IndexScoresAtArgs& a) {
  Refusal refusal =
      refuse_scorer({a.index_query, a.index_key, a.index_weights, a.starts, a.ends, a.relu});
  return refusal;
}

std::int64_t worker_bytes(const IndexScoresAtArgs& a) {
  Carve carve(nullptr);
  const Worker worker(carve, a);
  return carve.used();
}

std::int64_t workspace_bytes(const IndexScoresAtArgs& a) {
  return worker_bytes(a) * num_threads() + 63;
}

template <class T>
void score_slots(const IndexScoresAtArgs& a, std::int64_t i, std::int64_t first,
                 const Worker& own) {
  const std::int64_t heads = a.index_query.shape[1], dim = a.index_query.shape[2];
  const std::int64_t last = min64(first + kSpan, a.topk_indices.shape[1]);
  const RowRange range = row_range(a.starts, a.ends, i, a.index_key.shape[0]);
  float* out = a.topk_scores.as<float>() + i * a.topk_scores.strides[0];
  const std::int64_t out_stride = a.topk_scores.strides[1];
  for (std::int64_t s = first; s < last; ++s) out[s * out_stride] = -__builtin_inff();
  const std::int64_t count = keep_slots(a.topk_indices, i, first, last, range, own.slot, own.id);
  if (count == 0) return;

  const Tiles tiles(static_cast<int>(heads));
  pack_heads(a.index_query, i, tiles, own.tiles);
  pack_weights(a.index_weights, i, own.weights);

  const Activation activation(a.relu);
  const KeyRows<T> keys(a.index_key);
  const Slots slots = {own.id, 0, count};
  const std::int64_t key_bytes = dim * static_cast<std::int64_t>(sizeof(T));
  const auto lines = static_cast<int>(kPanel * (key_bytes / 64 + 1) / tiles.count + 1);
  for (std::int64_t s = 0; s < count; s += kPanel) {
    const T* row[kPanel];
    slot_rows(keys, slots, s, row);
    pack_panel(row, dim, own.panel);
    Prefetcher ahead(key_bytes);
    for (std::int64_t n = s + kPanel; n < min64(count, s + 2 * kPanel); ++n) {
      ahead.add(keys[own.id[n]]);
    }
    float scores[kPanel];
    score_panel(own.tiles, own.weights, tiles, activation, dim, own.panel, ahead, lines, scores);
    for (std::int64_t n = s; n < min64(count, s + kPanel); ++n) {
      out[own.slot[n] * out_stride] = scores[n - s];
    }
  }
}

void run(const IndexScoresAtArgs& a, Workspace workspace) {
  const std::int64_t spans = ceil_div(a.topk_indices.shape[1], kSpan);
  const std::int64_t own_bytes = worker_bytes(a);
  Carve carve(workspace.data);
  auto* memory = carve.take<unsigned char>(own_bytes * num_threads());
  with_element(a.index_query.dtype, [&]<class T>(const T*) {
    parallel_for(a.index_query.shape[0] * spans, [&](std::int64_t task, int worker) {
      Carve own_carve(memory + worker * own_bytes);
      const Worker own(own_carve, a);
      const std::int64_t i = task / spans, first = task % spans * kSpan;
      score_slots<T>(a, i, first, own);
    });
  });
}

}  // namespace

extern const Implementation<IndexScoresAtArgs> index_scores_at_implementation;
const Implementation<IndexScoresAtArgs> index_scores_at_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
