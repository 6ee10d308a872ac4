// attention_target on CPUs.
//
// Algorithm: one row times 512 slots is a task. The row's heads are packed once into tiles
//   [dim_qk][<= 6]; 16 kept slots at a time become a panel [dim_qk][16] of gathered keys, which all
//   tiles of its key head run against; exp of the accumulators is added up in two registers.
// Order: dot = one FMA chain over channels ascending from +0; x = fma(dot, scale, -lse); target =
//   additions over heads ascending from +0.
// Bound by the FMA units: 2 * heads * dim_qk FLOPs per slot;
//   a gathered panel costs as much as about 8 heads,
//   an exponential as much as about 20 channels of a head.
#include "winnow/attention_target.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/scorer.h"
#include "cpu/slots.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kSpan = 512;  // slots of a task

struct Worker {
  float *tiles, *lse, *panel;
  std::int32_t *slot, *id;

  Worker(Carve& carve, const AttentionTargetArgs& a) {
    const std::int64_t heads = a.query.shape[1], dim = a.query.shape[2];
    tiles = carve.take<float>(heads * dim + kTileSlack);
    lse = carve.take<float>(heads);
    panel = carve.take<float>(dim * kPanel);
    slot = carve.take<std::int32_t>(kSpan);
    id = carve.take<std::int32_t>(kSpan);
  }
};

Refusal refuse(const AttentionTargetArgs& a) {
  if (a.query.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.query) || !has_unit_stride(a.key)) {
    return "query and key must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t worker_bytes(const AttentionTargetArgs& a) {
  Carve carve(nullptr);
  const Worker worker(carve, a);
  return carve.used();
}

std::int64_t workspace_bytes(const AttentionTargetArgs& a) {
  return worker_bytes(a) * num_threads() + 63;
}

// sums += exp(scale * head . key - lse) over the heads of one key head.
__attribute__((noinline)) void add_heads(const float* tile, const float* lse, Tiles tiles,
                                         std::int64_t dim, const float* panel, float scale,
                                         Prefetcher& ahead, int lines, F8 (&sum)[2]) {
  for_head_dots(
      tile, tiles, dim, panel, ahead, lines,
      [&]<int kHeads>(std::int64_t first, Wide(&dot)[kHeads]) __attribute__((always_inline)) {
        for (int h = 0; h < kHeads; ++h) {
          const float own = lse[first + h];
          if (own == -__builtin_inff()) continue;  // the head saw no key
          sum[0] += exp8(fma(low8(dot[h]), splat(scale), splat(-own)));
          sum[1] += exp8(fma(high8(dot[h]), splat(scale), splat(-own)));
        }
      });
}

template <class T>
void target_slots(const AttentionTargetArgs& a, std::int64_t i, std::int64_t first,
                  const Worker& own) {
  const std::int64_t heads = a.query.shape[1], dim = a.query.shape[2], kv_heads = a.key.shape[1];
  const std::int64_t group = heads / kv_heads;
  const std::int64_t last = min64(first + kSpan, a.topk_indices.shape[1]);
  const RowRange range = row_range(a.starts, a.ends, i, a.key.shape[0]);
  float* out = a.attention_target.as<float>() + i * a.attention_target.strides[0];
  const std::int64_t out_stride = a.attention_target.strides[1];
  for (std::int64_t s = first; s < last; ++s) out[s * out_stride] = 0;
  const std::int64_t count = keep_slots(a.topk_indices, i, first, last, range, own.slot, own.id);
  if (count == 0) return;

  const Tiles tiles(static_cast<int>(group));
  const T* query = a.query.as<T>() + i * a.query.strides[0];
  const std::int64_t head_stride = a.query.strides[1];
  for (std::int64_t g = 0; g < kv_heads; ++g) {
    for (int t = 0; t < tiles.count; ++t) {
      const std::int64_t h = g * group + tiles.first(t);
      pack_tile(query + h * head_stride, head_stride, tiles.rows(t), dim, own.tiles + h * dim);
    }
  }
  const float* lse = a.lse.as<float>() + i * a.lse.strides[0];
  for (std::int64_t h = 0; h < heads; ++h) own.lse[h] = lse[h * a.lse.strides[1]];

  const auto scale = static_cast<float>(a.softmax_scale);
  const std::int64_t key_bytes = dim * static_cast<std::int64_t>(sizeof(T));
  const auto lines = static_cast<int>(kPanel * (key_bytes / 64 + 1) / tiles.count + 1);
  const Slots slots = {own.id, 0, count};
  for (std::int64_t s = 0; s < count; s += kPanel) {
    F8 sum[2] = {zero8(), zero8()};
    for (std::int64_t g = 0; g < kv_heads; ++g) {
      const KeyRows<T> keys(a.key, g);
      const T* row[kPanel];
      slot_rows(keys, slots, s, row);
      pack_panel(row, dim, own.panel);
      Prefetcher ahead(key_bytes);
      for (std::int64_t n = s + kPanel; n < min64(count, s + 2 * kPanel); ++n) {
        ahead.add(keys[own.id[n]]);
      }
      add_heads(own.tiles + g * group * dim, own.lse + g * group, tiles, dim, own.panel, scale,
                ahead, lines, sum);
    }
    float target[kPanel];
    store(target, sum[0]);
    store(target + 8, sum[1]);
    for (std::int64_t n = s; n < min64(count, s + kPanel); ++n) {
      out[own.slot[n] * out_stride] = target[n - s];
    }
  }
}

void run(const AttentionTargetArgs& a, Workspace workspace) {
  const std::int64_t spans = ceil_div(a.topk_indices.shape[1], kSpan);
  const std::int64_t own_bytes = worker_bytes(a);
  Carve carve(workspace.data);
  auto* memory = carve.take<unsigned char>(own_bytes * num_threads());
  with_element(a.query.dtype, [&]<class T>(const T*) {
    parallel_for(a.query.shape[0] * spans, [&](std::int64_t task, int worker) {
      Carve own_carve(memory + worker * own_bytes);
      const Worker own(own_carve, a);
      target_slots<T>(a, task / spans, task % spans * kSpan, own);
    });
  });
}

}  // namespace

extern const Implementation<AttentionTargetArgs> attention_target_implementation;
const Implementation<AttentionTargetArgs> attention_target_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
