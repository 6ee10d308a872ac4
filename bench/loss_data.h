// The inputs that the problems of the indexer losses share.
#pragma once

#include <cmath>

#include "base/row_range.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "ref/reader.h"

namespace winnow::bench {

inline DType wide_of(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Rows, their ranges and, where the problem has "topk", their lists.
struct ListData {
  std::int64_t rows, keys, topk = 0;
  Guarded starts, ends, indices;

  ListData(const Problem& p, Random& random, bool lists)
      : rows(p.number("rows")), keys(p.number("keys")) {
    if (lists) topk = p.number("topk");
    starts = Guarded(DType::kI32, {rows});
    ends = Guarded(DType::kI32, {rows});
    fill_ranges(p.word("range"), keys, lists ? topk : 16, starts, ends, random);
    if (!lists) return;
    indices = Guarded(DType::kI32, {rows, topk});
    fill_indices(p.word("ids"), keys, starts, ends, indices, random);
  }
  RowRange range(std::int64_t i) const { return row_range(starts, ends, i, keys); }
  // The id of a slot that counts, else -1.
  std::int64_t id(std::int64_t i, std::int64_t s) const {
    const std::int64_t j = ref::get_id(indices, i, s);
    return range(i).contains(j) ? j : -1;
  }
  double slots() const {
    std::int64_t n = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t s = 0; s < topk; ++s) n += id(i, s) >= 0 ? 1 : 0;
    }
    return static_cast<double>(n);
  }
  double pairs() const {
    double n = 0;
    for (std::int64_t i = 0; i < rows; ++i) n += static_cast<double>(range(i).length());
    return n;
  }
};

struct IndexerData {
  Guarded query, key, weights;

  IndexerData(const Problem& p, Random& random) {
    const std::int64_t rows = p.number("rows"), heads = p.number("index_heads"),
                       dim = p.number("index_dim");
    query = Guarded(p.dtype(), {rows, heads, dim});
    key = Guarded(p.dtype(), {p.number("keys"), dim});
    weights = Guarded(p.dtype() == DType::kF64 ? DType::kF64 : p.dtype("weights"), {rows, heads});
    fill_gauss(query, random);
    fill_gauss(key, random);
    fill_gauss(weights, random, 1 / std::sqrt(static_cast<double>(heads * dim)));
  }
  double head_channels() const {
    return static_cast<double>(query.view().shape[1] * query.view().shape[2]);
  }
};

// Gaussian logits of variance 1, and the lse that such a row has; every fifth row has a head that
// saw no key.
struct AttentionData {
  Guarded query, key, lse;
  double scale;

  AttentionData(const Problem& p, const ListData& lists, Random& random) {
    const std::int64_t heads = p.number("heads"), dim = p.number("dim_qk");
    query = Guarded(p.dtype(), {lists.rows, heads, dim});
    key = Guarded(p.dtype(), {lists.keys, p.number("kv_heads"), dim});
    lse = Guarded(wide_of(p.dtype()), {lists.rows, heads});
    scale = 1 / std::sqrt(static_cast<double>(dim));
    fill_gauss(query, random);
    fill_gauss(key, random);
    for (std::int64_t i = 0; i < lists.rows && !ShapesOnly::on(); ++i) {
      const auto length = static_cast<double>(lists.range(i).length());
      for (std::int64_t h = 0; h < heads; ++h) {
        const bool blind = length == 0 || (i % 5 == 4 && h == i % heads);
        ref::set(lse, i, h, blind ? -INFINITY : std::log(length) + 0.5 + 0.1 * random.gauss());
      }
    }
  }
  double head_channels() const {
    return static_cast<double>(query.view().shape[1] * query.view().shape[2]);
  }
};

}  // namespace winnow::bench
