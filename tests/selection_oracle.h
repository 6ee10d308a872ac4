// The selection rule once more, as plainly as it can be said: sort all candidates. Written from
// include/winnow/select_topk.h, on purpose without src/ref.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace winnow::test {

// ids (ascending) of the k best of scores[0..n), counted from first_id.
inline std::vector<std::int32_t> best_ids(const std::vector<float>& scores, std::int64_t k,
                                          std::int32_t first_id = 0) {
  std::vector<std::int32_t> order;
  for (std::size_t t = 0; t < scores.size(); ++t) {
    if (!std::isnan(scores[t]) && scores[t] != -INFINITY)
      order.push_back(static_cast<std::int32_t>(t));
  }
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  if (static_cast<std::int64_t>(order.size()) > k) order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());
  for (std::int32_t& id : order) id += first_id;
  return order;
}

}  // namespace winnow::test
