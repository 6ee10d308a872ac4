// index_scores_at_backward on CPUs.
//
// Algorithm: rows in chunks, two phases per chunk.
//   1, tasks are rows: the kept slots are put in order of the owner of their key (list order within
//      an owner). 64 slots at a time are packed twice, as panels [dim][16] for the dots and as rows
//      for d_index_query; the gated gradients [heads][16] of the row stay in the workspace, with
//      the query rows times their weights.
//   2, tasks are owners, each a fixed span of keys: an owner goes through the rows of the chunk in
//      ascending order and adds what their slots give to its rows of d_index_key.
// Owners depend on the numbers of keys and slots only, chunks on sizes only, and a chunk leaves no
// trace in the sums (index_backward.h), so neither threads nor chunks can change a bit.
// 6 * heads * dim FLOPs per slot against 8 * heads bytes that go through L2 and two packed keys:
// bound by the FMA units from about 16 heads on.
#include "winnow/index_scores_at_backward.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/index_backward.h"
#include "cpu/owners.h"
#include "cpu/scorer.h"
#include "cpu/slots.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kMaxOwners = 64;
constexpr std::int64_t kChunkBytes = 4 << 20;  // of the rows of a chunk, which are at least 16

struct Plan {
  std::int64_t rows, keys, heads, dim, channels, topk, slots;
  std::int64_t owners, owned_keys;
  std::int64_t chunk;

  explicit Plan(const IndexScoresAtBackwardArgs& a)
      : rows(a.index_query.shape[0]),
        keys(a.index_key.shape[0]),
        heads(a.index_query.shape[1]),
        dim(a.index_query.shape[2]),
        channels(padded16(dim)),
        topk(a.topk_indices.shape[1]),
        slots(padded16(topk)) {
    // An owner with few slots of a row would fill its tiles badly.
    owners = min64(max64(1, min64(keys / 256, topk / 16)), kMaxOwners);
    owned_keys = max64(1, ceil_div(keys, owners));
    const std::int64_t row_bytes = 4 * (slots * (heads + 1) + heads * channels);
    chunk = min64(rows, max64(16, kChunkBytes / row_bytes));
  }
};

// What phase 1 leaves to phase 2, per row of the chunk.
struct Shared {
  float* gated;         // [chunk][slots / 16][heads][16]
  float* weighted;      // [chunk][channels / 16][heads][16]
  std::int32_t* id;     // [chunk][slots]
  std::int32_t* first;  // [chunk][owners + 1]: of the slots of an owner

  Shared(Carve& carve, const Plan& p)
      : gated(carve.take<float>(p.chunk * p.slots * p.heads)),
        weighted(carve.take<float>(p.chunk * p.channels * p.heads)),
        id(carve.take<std::int32_t>(p.chunk * p.slots)),
        first(carve.take<std::int32_t>(p.chunk * (p.owners + 1))) {}
};

struct Worker {
  float *tiles, *weights, *panel, *rows, *d_query, *d_weights;
  std::int32_t *slot, *id, *order;

  Worker(Carve& carve, const Plan& p)
      : tiles(carve.take<float>(p.heads * p.dim + kTileSlack)),
        weights(carve.take<float>(p.heads)),
        panel(carve.take<float>(p.dim * kPanel)),
        rows(carve.take<float>(p.channels * kKeyBlock)),
        d_query(carve.take<float>(p.heads * p.channels)),
        d_weights(carve.take<float>(p.heads * 8)),
        slot(carve.take<std::int32_t>(p.topk)),
        id(carve.take<std::int32_t>(p.topk)),
        order(carve.take<std::int32_t>(p.topk)) {}
};

std::int64_t worker_bytes(const Plan& plan) {
  Carve carve(nullptr);
  const Worker worker(carve, plan);
  return carve.used();
}

Refusal refuse(const IndexScoresAtBackwardArgs& a) {
  if (a.index_query.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.index_query) || !has_unit_stride(a.index_key) ||
      !has_unit_stride(a.d_index_query) || !has_unit_stride(a.d_index_key)) {
    return "index_query, index_key and their gradients must have stride 1 on their last axis";
  }
  return refuse_uncountable(a.index_query.shape[1],
                            a.topk_indices.shape[1] + a.index_query.shape[2]);
}

std::int64_t workspace_bytes(const IndexScoresAtBackwardArgs& a) {
  const Plan plan(a);
  Carve carve(nullptr);
  const Shared shared(carve, plan);
  return carve.used() + worker_bytes(plan) * num_threads() + 63;
}

// Phase 1 of row i, row r of the chunk.
template <class T>
void row_gradient(const IndexScoresAtBackwardArgs& a, const Plan& p, std::int64_t i, std::int64_t r,
                  const Shared& shared, const Worker& own) {
  const RowRange range = row_range(a.starts, a.ends, i, p.keys);
  const std::int64_t count = keep_slots(a.topk_indices, i, 0, p.topk, range, own.slot, own.id);
  std::int32_t* id = shared.id + r * p.slots;
  order_by_owner(own.id, count, p.owned_keys, p.owners, shared.first + r * (p.owners + 1),
                 own.order);
  for (std::int64_t s = 0; s < count; ++s) id[s] = own.id[own.order[s]];

  const T* query = a.index_query.as<T>() + i * a.index_query.strides[0];
  const std::int64_t head_stride = a.index_query.strides[1];
  pack_weights(a.index_weights, i, own.weights);
  const Tiles tiles(static_cast<int>(p.heads));
  pack_heads(a.index_query, i, tiles, own.tiles);
  for (std::int64_t h = 0; h < p.heads; ++h) {
    const T* head = query + h * head_stride;
    copy_rows(&head, own.weights + h, 1, p.dim, p.heads * kPanel,
              shared.weighted + r * p.channels * p.heads + h * kPanel);
  }

  for (std::int64_t x = 0; x < p.heads * p.channels; ++x) own.d_query[x] = 0;
  for (std::int64_t x = 0; x < p.heads * 8; ++x) own.d_weights[x] = 0;
  const KeyRows<T> keys(a.index_key);
  const Slots slots = {id, 0, count};
  const float* d_scores = a.d_scores.as<float>() + i * a.d_scores.strides[0];
  for (std::int64_t b = 0; b < count; b += kKeyBlock) {
    const std::int64_t block = min64(kKeyBlock, count - b);
    float* gated = shared.gated + (r * p.slots + b) * p.heads;
    for (std::int64_t s = 0; s < block; s += kPanel) {
      const T* row[kPanel];
      slot_rows(keys, slots, b + s, row);
      pack_key_panel(row, p.dim, own.panel);
      const std::int64_t n = min64(kPanel, block - s);
      copy_rows(row, nullptr, n, p.dim, kKeyBlock * kPanel, own.rows + s * kPanel);
      float g[kPanel] = {};
      for (std::int64_t x = 0; x < n; ++x) {
        g[x] = d_scores[own.slot[own.order[b + s + x]] * a.d_scores.strides[1]];
      }
      const auto left = static_cast<std::int32_t>(n);
      const Gate gate(a.relu, {load(g), load(g + 8)},
                      {iota8() < splat(left), iota8() < splat(left - 8)});
      gate_keys(own.tiles, tiles, p.dim, own.panel, gate, gated + s * p.heads, own.d_weights);
    }
    add_query_gradient(gated, tiles, p.heads, own.rows, 0, block, p.channels, own.d_query);
  }

  float* d_query = a.d_index_query.as<float>() + i * a.d_index_query.strides[0];
  float* d_weights = a.d_index_weights.as<float>() + i * a.d_index_weights.strides[0];
  for (std::int64_t h = 0; h < p.heads; ++h) {
    d_weights[h * a.d_index_weights.strides[1]] = sum8(load(own.d_weights + h * 8));
    for (std::int64_t d = 0; d < p.dim; ++d) {
      d_query[h * a.d_index_query.strides[1] + d] =
          count == 0 ? 0 : own.weights[h] * own.d_query[h * p.channels + d];
    }
  }
}

// Phase 2 of one owner.
void key_gradient(const IndexScoresAtBackwardArgs& a, const Plan& p, std::int64_t owner,
                  std::int64_t chunk_rows, const Shared& shared) {
  float* d_key = a.d_index_key.as<float>();
  for (std::int64_t r = 0; r < chunk_rows; ++r) {
    const std::int32_t* first = shared.first + r * (p.owners + 1) + owner;
    const std::int32_t* id = shared.id + r * p.slots;
    for (std::int64_t s = first[0]; s < first[1];) {
      const std::int64_t group = s / kPanel * kPanel, most = min64(first[1], group + kPanel);
      float* at[kPanel];
      std::int64_t end = s;
      for (bool twice = false; end < most; ++end) {  // a tile must not hold one key twice
        for (std::int64_t n = s; n < end; ++n) twice |= id[n] == id[end];
        if (twice) break;
        at[end - group] = d_key + id[end] * a.d_index_key.strides[0];
      }
      add_key_gradient(shared.gated + (r * p.slots + group) * p.heads, p.heads,
                       shared.weighted + r * p.channels * p.heads, s - group, end - group, p.dim,
                       at);
      s = end;
    }
  }
}

void run(const IndexScoresAtBackwardArgs& a, Workspace workspace) {
  const Plan plan(a);
  const std::int64_t own_bytes = worker_bytes(plan);
  Carve carve(workspace.data);
  const Shared shared(carve, plan);
  auto* memory = carve.take<unsigned char>(own_bytes * num_threads());
  parallel_for(plan.owners, [&](std::int64_t owner, int) {
    for (std::int64_t j = owner * plan.owned_keys;
         j < min64(plan.keys, (owner + 1) * plan.owned_keys); ++j) {
      float* d_key = a.d_index_key.as<float>() + j * a.d_index_key.strides[0];
      for (std::int64_t d = 0; d < plan.dim; ++d) d_key[d] = 0;
    }
  });
  for (std::int64_t begin = 0; begin < plan.rows; begin += plan.chunk) {
    const std::int64_t chunk_rows = min64(plan.chunk, plan.rows - begin);
    with_element(a.index_query.dtype, [&]<class T>(const T*) {
      parallel_for(chunk_rows, [&](std::int64_t r, int worker) {
        Carve own_carve(memory + worker * own_bytes);
        row_gradient<T>(a, plan, begin + r, r, shared, Worker(own_carve, plan));
      });
    });
    parallel_for(plan.owners, [&](std::int64_t owner, int) {
      key_gradient(a, plan, owner, chunk_rows, shared);
    });
  }
}

}  // namespace

extern const Implementation<IndexScoresAtBackwardArgs> index_scores_at_backward_implementation;
const Implementation<IndexScoresAtBackwardArgs> index_scores_at_backward_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
