// Keys of one channel whose scores are numbers that a test writes down: one head, query and weight
// 1, no ReLU, so that the score of key j is the key. The rule of selection can then be put to
// index_topk in the very cases that are put to select_topk, over keys in one piece and in pages.
#pragma once

#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "tests/each.h"
#include "winnow/index_topk.h"

namespace winnow::testing {

struct ScoredKeys {
  using Ids = std::vector<std::int32_t>;

  bench::Guarded query, weights, starts, ends, row_request, pages, table;
  bench::Guarded indices, lengths, scores;
  IndexTopkArgs args;

  // Row i sees [from[i], to[i]) of the keys, in pages of `page` that lie in reverse order; page 0:
  // in one piece. The last page is full of NaN behind the last key.
  ScoredKeys(const std::vector<float>& keys, const Ids& from, const Ids& to, std::int64_t k,
             std::int64_t page, DType dtype = DType::kF32) {
    const auto rows = static_cast<std::int64_t>(from.size()),
               count = static_cast<std::int64_t>(keys.size());
    make_rows(dtype, from, to, k);
    const std::int64_t blocks = page == 0 ? 1 : (count + page - 1) / page;
    const std::int64_t block = page == 0 ? count : page;
    pages = bench::Guarded(dtype, {blocks, block, 1});
    const auto put = [&](std::int64_t place, double x) {
      store_double(pages.view().data, dtype, place, x);
    };
    for (std::int64_t j = 0; j < blocks * block; ++j) {
      const std::int64_t place = (blocks - 1 - j / block) * block + j % block;
      put(place, j < count ? static_cast<double>(keys[static_cast<std::size_t>(j)])
                           : std::numeric_limits<double>::quiet_NaN());
    }
    if (page == 0) {
      args.index_key = pages.view().reshape({count, 1});
    } else {
      table = bench::Guarded(DType::kI32, {1, blocks});
      for (std::int64_t b = 0; b < blocks; ++b)
        table.view().as<std::int32_t>()[b] = static_cast<std::int32_t>(blocks - 1 - b);
      row_request = bench::Guarded(DType::kI32, {rows});
      args.index_key = KeyView(pages, table, row_request);
    }
  }
  // Rows over keys that the test lays out itself.
  ScoredKeys(DType dtype, const Ids& from, const Ids& to, std::int64_t k) {
    make_rows(dtype, from, to, k);
    row_request = bench::Guarded(DType::kI32, {static_cast<std::int64_t>(from.size())});
  }

  // Selected ids of every row, into poisoned outputs; the tails are -1 and -inf.
  std::vector<Ids> run() const {
    for (const Tensor& t : {indices.view(), lengths.view(), scores.view()}) bench::poison(t);
    const bench::Guarded workspace(DType::kU8, {index_topk_workspace_bytes(args)});
    index_topk(args, {workspace.view().data, workspace.view().elements()});
    std::vector<Ids> all;
    const std::int64_t k = indices.view().shape[1];
    for (std::int64_t i = 0; i < indices.view().shape[0]; ++i) {
      const std::int32_t* id = indices.view().as<std::int32_t>() + i * k;
      const float* score = scores.view().as<float>() + i * k;
      const std::int32_t n = lengths.view().as<std::int32_t>()[i];
      EXPECT_GE(n, 0);
      EXPECT_LE(n, k);
      for (std::int64_t s = n; s < k; ++s) {
        EXPECT_EQ(id[s], -1);
        EXPECT_EQ(score[s], -std::numeric_limits<float>::infinity());
      }
      all.emplace_back(id, id + n);
    }
    return all;
  }

 private:
  void make_rows(DType dtype, const Ids& from, const Ids& to, std::int64_t k) {
    const auto rows = static_cast<std::int64_t>(from.size());
    query = bench::Guarded(dtype, {rows, 1, 1});
    weights = bench::Guarded(DType::kF32, {rows, 1});
    starts = bench::Guarded(DType::kI32, {rows});
    ends = bench::Guarded(DType::kI32, {rows});
    indices = bench::Guarded(DType::kI32, {rows, k});
    lengths = bench::Guarded(DType::kI32, {rows});
    scores = bench::Guarded(DType::kF32, {rows, k});
    for (std::int64_t i = 0; i < rows; ++i) {
      store_double(query.view().data, dtype, i, 1);
      weights.view().as<float>()[i] = 1;
      starts.view().as<std::int32_t>()[i] = from[static_cast<std::size_t>(i)];
      ends.view().as<std::int32_t>()[i] = to[static_cast<std::size_t>(i)];
    }
    args = {query, {}, weights, starts, ends, false, indices, lengths, scores};
  }
};

}  // namespace winnow::testing
