// Keys of several requests, in one piece each and in the pages of a shared pool.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "base/numbers.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "winnow/key_view.h"

namespace winnow::testing {

struct PagedKeys {
  std::int64_t page, pages = 0, max_pages = 0;
  std::vector<bench::Guarded> alone;  // [request] -> [length, dim]
  bench::Guarded pool;                // [pages, page + gap, dim + 3]; unused keys are NaN
  bench::Guarded table;               // [requests, max_pages]

  // Pages lie in a shuffled order; unused entries of the table are -1.
  PagedKeys(DType dtype, const std::vector<std::int64_t>& lengths, std::int64_t dim,
            std::int64_t page_size, std::int64_t spare_columns = 1)
      : page(page_size), dim_(dim) {
    bench::Random random(23);
    for (const std::int64_t n : lengths) {
      alone.emplace_back(dtype, std::initializer_list<std::int64_t>{n, dim});
      bench::fill_gauss(alone.back(), random);
      pages += (n + page - 1) / page;
      max_pages = std::max(max_pages, (n + page - 1) / page);
    }
    pages += 2;  // never used
    max_pages += spare_columns;
    pool = bench::Guarded(dtype, {pages, page + 1, dim + 3});
    const auto requests = static_cast<std::int64_t>(lengths.size());
    table = bench::Guarded(DType::kI32, {requests, max_pages});
    for (std::int64_t i = 0; i < pool.view().elements(); ++i)
      store_double(pool.view().data, dtype, i, std::numeric_limits<double>::quiet_NaN());
    std::vector<std::int32_t> order(static_cast<std::size_t>(pages));
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = pages - 1; i > 0; --i)
      std::swap(order[static_cast<std::size_t>(i)],
                order[static_cast<std::size_t>(random.below(i + 1))]);
    const std::int64_t key_bytes = dim * dtype_bytes(dtype);
    std::size_t next = 0;
    for (std::int64_t q = 0; q < requests; ++q) {
      const std::int64_t n = lengths[static_cast<std::size_t>(q)];
      for (std::int64_t slot = 0; slot < max_pages; ++slot)
        entry(q, slot) = slot * page < n ? order[next++] : -1;
      for (std::int64_t j = 0; j < std::min(n, max_pages * page); ++j) {
        std::memcpy(key(entry(q, j / page), j % page),
                    alone[static_cast<std::size_t>(q)].view().as<char>() + j * key_bytes,
                    static_cast<std::size_t>(key_bytes));
      }
    }
  }

  std::int32_t& entry(std::int64_t request, std::int64_t slot) const {
    return table.view().as<std::int32_t>()[request * max_pages + slot];
  }
  char* key(std::int64_t page_id, std::int64_t at) const {
    const Tensor& t = pool;
    return t.as<char>() + (page_id * t.strides[0] + at * t.strides[1]) * dtype_bytes(t.dtype);
  }
  // Keys that do not lie side by side: a page holds one unused key, a key three unused channels.
  KeyView view(const Tensor& row_request) const {
    Tensor data = pool.view().channels(0, dim_);
    data.shape[1] = page;
    return {data, table, row_request};
  }

 private:
  std::int64_t dim_;
};

}  // namespace winnow::testing
