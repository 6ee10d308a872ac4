// The gradients of sparse_attention by query, key and value, in double: the formulas of the
// contract, one key head at a time. Sums over rows stay in double and are rounded once, at the end.
//
// A head whose lse is -inf had no slot of any weight: p and dz are 0. A duplicate id is a slot of
// its own here too: both slots add their gradient to the same key.
#include <algorithm>
#include <cmath>

#include "ref/attention.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const SparseAttentionBackwardArgs& a) {
  const std::int64_t keys = a.key.shape[0];
  return bytes_for_doubles(2 * most_slots(a.topk_indices, keys) +
                           keys * (a.key.shape[2] + a.d_output.shape[2]));
}

void run(const SparseAttentionBackwardArgs& a, Workspace workspace) {
  const std::int64_t rows = a.query.shape[0], heads = a.query.shape[1], dim_qk = a.query.shape[2];
  const std::int64_t keys = a.key.shape[0], kv_heads = a.key.shape[1], group = heads / kv_heads;
  const std::int64_t dim_v = a.d_output.shape[2];
  const bool shared = a.value.empty();  // the value is key[..., :dim_v]
  const Tensor& value = shared ? a.key : a.value;
  const std::int64_t most = most_slots(a.topk_indices, keys);
  double* p = doubles_in(workspace);        // [slots]
  double* dz = p + most;                    // [slots]
  double* d_key = dz + most;                // [keys][dim_qk] of one key head
  double* d_value = d_key + keys * dim_qk;  // [keys][dim_v]
  for (std::int64_t g = 0; g < kv_heads; ++g) {
    std::fill(d_key, d_value + keys * dim_v, 0.0);
    for (std::int64_t i = 0; i < rows; ++i) {
      const RowRange range = row_range(a.starts, a.ends, i, keys);
      for (std::int64_t h = g * group; h < (g + 1) * group; ++h) {
        const double lse = get(a.lse, i, h);
        const bool weightless = std::isinf(lse) && lse < 0;
        auto slots = [&](auto&& visit) {
          for_each_slot(a.topk_indices, a.topk_lengths, range, i, visit);
        };
        double delta = 0;
        slots([&](std::int64_t s, std::int64_t id) {
          p[s] = dz[s] = 0;
          if (weightless) return;
          p[s] = std::exp(a.softmax_scale * head_dot(a.query, i, h, a.key, id, g, dim_qk) - lse);
          dz[s] = head_dot(a.d_output, i, h, value, id, g, dim_v);  // dp
          delta += p[s] * dz[s];
        });
        slots([&](std::int64_t s, std::int64_t id) {
          dz[s] = p[s] * (dz[s] - delta);
          for (std::int64_t d = 0; d < dim_qk; ++d)
            d_key[id * dim_qk + d] += a.softmax_scale * dz[s] * get(a.query, i, h, d);
          for (std::int64_t c = 0; c < dim_v; ++c)
            d_value[id * dim_v + c] += p[s] * get(a.d_output, i, h, c);
        });
        for (std::int64_t d = 0; d < dim_qk; ++d) {
          double sum = 0;
          slots([&](std::int64_t s, std::int64_t id) { sum += dz[s] * get(a.key, id, g, d); });
          set(a.d_query, i, h, d, a.softmax_scale * sum);
        }
      }
    }
    for (std::int64_t j = 0; j < keys; ++j) {
      for (std::int64_t d = 0; d < dim_qk; ++d) {
        const bool both = shared && d < dim_v;
        set(a.d_key, j, g, d, d_key[j * dim_qk + d] + (both ? d_value[j * dim_v + d] : 0));
      }
      if (shared) continue;
      for (std::int64_t c = 0; c < dim_v; ++c) set(a.d_value, j, g, c, d_value[j * dim_v + c]);
    }
  }
}

}  // namespace

const Implementation<SparseAttentionBackwardArgs> sparse_attention_backward_implementation = {
    "reference", accept, workspace_bytes, run};

}  // namespace winnow::ref
