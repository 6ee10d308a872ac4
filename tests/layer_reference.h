// One DSA layer in plain loops and double precision, row by row: textbook attention with expanded
// keys and values, scores and pools token by token. Nothing of it is shared with the layer but the
// names of the weights.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "attention/config.h"
#include "base/numbers.h"
#include "base/parameters.h"

namespace winnow::attention {

class LayerReference {
 public:
  using Numbers = std::vector<double>;

  // x [rows, hidden] at `positions`.
  LayerReference(const AttentionConfig& config, const ParameterList& parameters, const Tensor& x,
                 const std::vector<std::int32_t>& positions)
      : c_(config), parameters_(parameters) {
    for (std::int64_t t = 0; t < x.shape[0]; ++t) {
      Numbers row;
      for (std::int64_t d = 0; d < x.shape[1]; ++d) {
        row.push_back(load_double(x.data, x.dtype, t * x.strides[0] + d));
      }
      add_token(row, positions[static_cast<std::size_t>(t)]);
    }
  }

  // What row i selects of the keys [start, end), ascending; pools begin at key `origin`.
  std::vector<std::int32_t> selected(std::int64_t row, std::int64_t start, std::int64_t end,
                                     std::int64_t origin) const {
    const std::int64_t size = c_.indexer.pool_size;
    std::vector<std::pair<double, std::int64_t>> order;  // -score, first token
    for (std::int64_t base = origin; base + size <= end; base += size) {
      if (base + size - 1 >= start) order.emplace_back(-score(row, base), base);
    }
    std::sort(order.begin(), order.end());
    const auto kept = static_cast<std::size_t>(c_.indexer.topk / size);
    if (order.size() > kept) {  // must not hang on roundings; ties of zeros are exact
      const double gap = order[kept].first - order[kept - 1].first;
      EXPECT_TRUE(gap > 1e-9 || order[kept - 1].first == 0) << row << ": " << gap;
      order.resize(kept);
    }
    std::vector<std::int32_t> ids;
    for (const auto& [negative, base] : order) {
      for (std::int64_t t = std::max(base, start); t < base + size; ++t) {
        ids.push_back(static_cast<std::int32_t>(t));
      }
    }
    if (size > 1 && c_.indexer.select_tail) {
      for (std::int64_t t = end - (end - start) % size; t < end; ++t) {
        ids.push_back(static_cast<std::int32_t>(t));
      }
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    return ids;
  }

  // [hidden], of attention to these keys.
  Numbers output(std::int64_t row, const std::vector<std::int32_t>& ids) const {
    const auto dim_v = static_cast<std::size_t>(c_.v_head_dim);
    Numbers heads;
    for (std::int64_t h = 0; h < c_.heads; ++h) {
      const std::int64_t group = c_.kind == AttentionKind::kMla ? h : h / (c_.heads / c_.kv_heads);
      Numbers weights, sum(dim_v);
      double total = 0;
      for (const std::int32_t j : ids) {
        weights.push_back(
            std::exp(c_.softmax_scale() * dot(at(at(queries_, row), h), at(at(keys_, j), group))));
        total += weights.back();
      }
      for (std::size_t s = 0; s < ids.size(); ++s) {
        const Numbers& value = at(at(values_, ids[s]), group);
        for (std::size_t d = 0; d < dim_v; ++d) sum[d] += weights[s] / total * value[d];
      }
      heads.insert(heads.end(), sum.begin(), sum.end());
    }
    return product("o_proj.weight", heads);
  }

 private:
  using Heads = std::vector<Numbers>;

  template <class List>
  static const typename List::value_type& at(const List& list, std::int64_t i) {
    return list[static_cast<std::size_t>(i)];
  }
  static double dot(const Numbers& a, const Numbers& b) {
    double sum = 0;
    for (std::size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
    return sum;
  }
  Numbers weight(const std::string& name) const {
    for (const auto& p : parameters_.all()) {
      if (p->name != name) continue;
      Numbers all;
      for (std::int64_t i = 0; i < p->value.elements(); ++i) {
        all.push_back(load_double(p->value.view().data, p->value.view().dtype, i));
      }
      return all;
    }
    ADD_FAILURE() << "there is no " << name;
    return {};
  }
  Numbers product(const std::string& name, const Numbers& x) const {
    const Numbers w = weight(name);
    Numbers y(w.size() / x.size());
    for (std::size_t o = 0; o < y.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
    }
    return y;
  }
  Numbers rms(Numbers x, const std::string& name) const {
    const Numbers w = weight(name);
    const double scale =
        1 / std::sqrt(dot(x, x) / static_cast<double>(x.size()) + c_.latent_norm_epsilon);
    for (std::size_t d = 0; d < x.size(); ++d) x[d] *= scale * w[d];
    return x;
  }
  Numbers layer_norm(Numbers x) const {
    const Numbers w = weight("indexer.k_norm.weight"), b = weight("indexer.k_norm.bias");
    const auto n = static_cast<double>(x.size());
    double mean = 0, squares = 0;
    for (const double v : x) mean += v / n;
    for (const double v : x) squares += (v - mean) * (v - mean) / n;
    for (std::size_t d = 0; d < x.size(); ++d) {
      x[d] = (x[d] - mean) / std::sqrt(squares + c_.indexer.k_norm_epsilon) * w[d] + b[d];
    }
    return x;
  }
  // Turns the channels [first, first + width).
  void turn(Numbers& x, std::int64_t first, std::int64_t width, nn::RopePairing pairing,
            std::int32_t position) const {
    for (std::int64_t i = 0; i < width / 2; ++i) {
      const bool interleaved = pairing == nn::RopePairing::kInterleaved;
      const auto a = static_cast<std::size_t>(first + (interleaved ? 2 * i : i)),
                 b = static_cast<std::size_t>(first + (interleaved ? 2 * i + 1 : i + width / 2));
      const double angle = position * std::pow(c_.rope_theta, -2.0 * static_cast<double>(i) /
                                                                  static_cast<double>(width));
      const double xa = x[a], xb = x[b];
      x[a] = xa * std::cos(angle) - xb * std::sin(angle);
      x[b] = xb * std::cos(angle) + xa * std::sin(angle);
    }
  }
  static Numbers hadamard(const Numbers& x) {
    Numbers y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < x.size(); ++j) {
        y[i] += (std::popcount(i & j) % 2 == 0 ? x[j] : -x[j]) /
                std::sqrt(static_cast<double>(x.size()));
      }
    }
    return y;
  }
  static Heads split(const Numbers& x, std::int64_t heads) {
    const std::size_t dim = x.size() / static_cast<std::size_t>(heads);
    Heads all;
    for (auto it = x.begin(); it != x.end(); it += static_cast<std::ptrdiff_t>(dim)) {
      all.emplace_back(it, it + static_cast<std::ptrdiff_t>(dim));
    }
    return all;
  }

  void add_token(const Numbers& x, std::int32_t position) {
    const bool mla = c_.kind == AttentionKind::kMla;
    const std::int64_t nope = c_.qk_nope_head_dim, rope = c_.qk_rope_head_dim;
    Numbers query_input = x;
    if (mla && c_.q_lora_rank > 0) {
      query_input = rms(product("q_a_proj.weight", x), "q_a_layernorm.weight");
    }
    Heads q =
        split(product(mla && c_.q_lora_rank > 0 ? "q_b_proj.weight" : "q_proj.weight", query_input),
              c_.heads);
    for (Numbers& head : q) turn(head, nope, rope, c_.rope_pairing, position);
    Heads keys, values;
    if (mla) {
      Numbers down = product("kv_a_proj_with_mqa.weight", x);
      Numbers rotated(down.begin() + static_cast<std::ptrdiff_t>(c_.kv_lora_rank), down.end());
      down.resize(static_cast<std::size_t>(c_.kv_lora_rank));
      turn(rotated, 0, rope, c_.rope_pairing, position);
      const Numbers up = product("kv_b_proj.weight", rms(down, "kv_a_layernorm.weight"));
      for (const Numbers& head : split(up, c_.heads)) {
        const auto cut = head.begin() + static_cast<std::ptrdiff_t>(nope);
        keys.emplace_back(head.begin(), cut);
        keys.back().insert(keys.back().end(), rotated.begin(), rotated.end());
        values.emplace_back(cut, head.end());
      }
    } else {
      keys = split(product("k_proj.weight", x), c_.kv_heads);
      for (Numbers& head : keys) turn(head, nope, rope, c_.rope_pairing, position);
      values = split(product("v_proj.weight", x), c_.kv_heads);
    }
    queries_.push_back(q);
    keys_.push_back(keys);
    values_.push_back(values);
    add_index(x, query_input, position);
  }

  void add_index(const Numbers& x, const Numbers& query_input, std::int32_t position) {
    const IndexerConfig& i = c_.indexer;
    const bool mla = c_.kind == AttentionKind::kMla, standard = i.mode == IndexerMode::kStandard;
    const std::int64_t first = mla ? 0 : i.index_dim - i.rope_dim;
    Heads q = split(product(mla ? "indexer.wq_b.weight" : "indexer.wq.weight", query_input),
                    i.index_heads);
    for (Numbers& head : q) {
      turn(head, first, i.rope_dim, i.rope_pairing, position);
      if (i.hadamard) head = hadamard(head);
    }
    Numbers key = product("indexer.wk.weight", x);
    if (standard) key = layer_norm(key);
    turn(key, first, i.rope_dim, i.rope_pairing, position);
    index_queries_.push_back(q);
    index_keys_.push_back(key);
    Numbers weights(q.size(), 1);
    if (standard) weights = product("indexer.weights_proj.weight", x);
    for (double& w : weights) {
      w /= std::sqrt(static_cast<double>(i.index_heads) * static_cast<double>(i.index_dim));
    }
    index_weights_.push_back(weights);
    if (i.pools()) gates_.push_back(product("indexer.index_kpool_compress_gate", x));
  }

  // Of row i and the pool that begins at token `base`.
  double score(std::int64_t row, std::int64_t base) const {
    const IndexerConfig& i = c_.indexer;
    Numbers key = at(index_keys_, base);
    if (i.pools()) {
      const Numbers ape = weight("indexer.index_kpool_compress_ape");
      for (std::size_t d = 0; d < key.size(); ++d) {
        double total = 0, sum = 0;
        for (std::int64_t t = 0; t < i.pool_size; ++t) {
          const double share =
              std::exp(at(gates_, base + t)[d] + ape[static_cast<std::size_t>(t) * key.size() + d]);
          total += share;
          sum += share * at(index_keys_, base + t)[d];
        }
        key[d] = sum / total;
      }
    }
    if (i.hadamard) key = hadamard(key);
    double total = 0;
    for (std::size_t h = 0; h < at(index_queries_, row).size(); ++h) {
      const double product = dot(at(index_queries_, row)[h], key);
      total += at(index_weights_, row)[h] * (i.relu ? std::max(0.0, product) : product);
    }
    return total;
  }

  const AttentionConfig c_;
  const ParameterList& parameters_;
  std::vector<Heads> queries_, keys_, values_, index_queries_;
  std::vector<Numbers> index_keys_, index_weights_, gates_;
};

}  // namespace winnow::attention
