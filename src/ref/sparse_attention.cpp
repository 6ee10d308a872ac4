// output = softmax(scale * query . key) . value over the valid slots of each row, in double.
//
// Details that the contract leaves to arithmetic: a valid slot whose logit is -inf weighs nothing,
// and a head in which every slot is such is one without a valid slot; NaN spreads over the head.
#include <cmath>
#include <limits>

#include "ref/attention.h"
#include "ref/implementations.h"
#include "ref/key_place.h"

namespace winnow::ref {
namespace {

std::int64_t workspace_bytes(const SparseAttentionArgs& a) {
  return bytes_for_doubles(most_slots(a.topk_indices, a.key.keys()));
}

void run(const SparseAttentionArgs& a, Workspace workspace) {
  const std::int64_t rows = a.query.shape[0], heads = a.query.shape[1], dim_qk = a.query.shape[2];
  const std::int64_t keys = a.key.keys();
  const std::int64_t group = heads / a.key.data.shape[static_cast<std::size_t>(a.key.key_axis())];
  const std::int64_t dim_v = a.output.shape[2];
  const Tensor& value = a.value.empty() ? a.key.data : a.value;
  double* z = doubles_in(workspace);  // [slots]: logits, then probabilities
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(a.starts, a.ends, i, keys);
    auto slots = [&](auto&& visit) {  // of keys that are not missing
      for_each_slot(a.topk_indices, a.topk_lengths, range, i, [&](std::int64_t s, std::int64_t id) {
        if (!place_of(a.key, i, id).missing()) visit(s, id);
      });
    };
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t g = h / group;
      double maximum = -std::numeric_limits<double>::infinity();
      slots([&](std::int64_t s, std::int64_t id) {
        const KeyPlace key = place_of(a.key, i, id);
        z[s] = a.softmax_scale * head_dot(a.query, i, h, key.keys, key.index, g, dim_qk);
        maximum = std::fmax(maximum, z[s]);
      });
      if (std::isinf(maximum) && maximum < 0) maximum = 0;  // no slot or no weight: sum stays 0
      double sum = 0;
      slots([&](std::int64_t s, std::int64_t) { sum += std::exp(z[s] - maximum); });
      set(a.lse, i, h, maximum + std::log(sum));
      slots([&](std::int64_t s, std::int64_t) { z[s] = std::exp(z[s] - maximum) / sum; });
      for (std::int64_t c = 0; c < dim_v; ++c) {
        double weighted = 0;
        if (sum != 0) {
          slots([&](std::int64_t s, std::int64_t id) {
            const KeyPlace at = place_of(a.key, value, i, id);
            weighted += z[s] * get(at.keys, at.index, g, c);
          });
        }
        set(a.output, i, h, c, weighted);
      }
    }
  }
}

}  // namespace

const Implementation<SparseAttentionArgs> sparse_attention_implementation = {"reference", accept,
                                                                             workspace_bytes, run};

}  // namespace winnow::ref
