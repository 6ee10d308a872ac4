#include "winnow/context_parallel.h"

#include <algorithm>

#include "base/check.h"

namespace winnow {
namespace {

constexpr char kName[] = "context_parallel";

// Rows that a rank holds of all sequences; checks the rules.
std::int64_t rows_of_rank(std::span<const std::int64_t> cu_seqlens, std::int64_t cp_size,
                          std::int64_t local_rows) {
  WINNOW_CHECK(kName, cp_size >= 1, "cp_size must be at least 1, got {}", cp_size);
  WINNOW_CHECK(kName, !cu_seqlens.empty() && cu_seqlens[0] == 0,
               "cu_seqlens must begin with 0, got {}",
               cu_seqlens.empty() ? "nothing" : fmt::format("{}", cu_seqlens[0]));
  for (std::size_t g = 0; g + 1 < cu_seqlens.size(); ++g) {
    const std::int64_t length = cu_seqlens[g + 1] - cu_seqlens[g];
    WINNOW_CHECK(kName, length >= 0, "cu_seqlens must not fall, got {} after {}", cu_seqlens[g + 1],
                 cu_seqlens[g]);
    WINNOW_CHECK(kName, cp_size == 1 || length % (2 * cp_size) == 0,
                 "the length of sequence {} must be a multiple of 2 cp_size = {}, got {}: pad it",
                 g, 2 * cp_size, length);
  }
  const std::int64_t rows = cu_seqlens.back() / cp_size;
  WINNOW_CHECK(kName, local_rows >= rows, "local_rows must be at least {}, got {}", rows,
               local_rows);
  return rows;
}

// Calls body(row, position) for the rows of a rank, in order.
template <class Body>
void for_rows(std::span<const std::int64_t> cu_seqlens, std::int64_t cp_size, std::int64_t cp_rank,
              const Body& body) {
  std::int64_t row = 0;
  for (std::size_t g = 0; g + 1 < cu_seqlens.size(); ++g) {
    const std::int64_t begin = cu_seqlens[g], end = cu_seqlens[g + 1];
    if (cp_size == 1) {
      for (std::int64_t p = begin; p < end; ++p) body(row++, p);
      continue;
    }
    const std::int64_t chunk = (end - begin) / (2 * cp_size);
    for (const std::int64_t first : {begin + cp_rank * chunk, end - (cp_rank + 1) * chunk}) {
      for (std::int64_t i = 0; i < chunk; ++i) body(row++, first + i);
    }
  }
}

}  // namespace

std::vector<std::int64_t> context_parallel_positions(std::span<const std::int64_t> cu_seqlens,
                                                     std::int64_t cp_size, std::int64_t cp_rank,
                                                     std::int64_t local_rows) {
  const std::int64_t rows = rows_of_rank(cu_seqlens, cp_size, local_rows);
  WINNOW_CHECK(kName, cp_rank >= 0 && cp_rank < cp_size, "cp_rank must be from 0 to {}, got {}",
               cp_size - 1, cp_rank);
  std::vector<std::int64_t> positions(static_cast<std::size_t>(local_rows));
  for_rows(cu_seqlens, cp_size, cp_rank, [&](std::int64_t row, std::int64_t position) {
    positions[static_cast<std::size_t>(row)] = position;
  });
  const std::int64_t behind = cu_seqlens.back() + cp_rank * local_rows - rows;
  for (std::int64_t row = rows; row < local_rows; ++row) {
    positions[static_cast<std::size_t>(row)] = behind + row;
  }
  return positions;
}

std::vector<std::int64_t> context_parallel_key_order(std::span<const std::int64_t> cu_seqlens,
                                                     std::int64_t cp_size,
                                                     std::int64_t local_rows) {
  const std::int64_t rows = rows_of_rank(cu_seqlens, cp_size, local_rows);
  std::vector<std::int64_t> order(static_cast<std::size_t>(local_rows * cp_size));
  std::int64_t padding = cu_seqlens.back();
  for (std::int64_t rank = 0; rank < cp_size; ++rank) {
    const std::int64_t first = rank * local_rows;
    for_rows(cu_seqlens, cp_size, rank, [&](std::int64_t row, std::int64_t position) {
      order[static_cast<std::size_t>(position)] = first + row;
    });
    for (std::int64_t row = rows; row < local_rows; ++row) {
      order[static_cast<std::size_t>(padding++)] = first + row;
    }
  }
  return order;
}

std::vector<std::int64_t> inverse_order(std::span<const std::int64_t> order) {
  const auto size = static_cast<std::int64_t>(order.size());
  std::vector<std::int64_t> inverse(order.size(), -1);
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t to = order[static_cast<std::size_t>(i)];
    WINNOW_CHECK(kName, to >= 0 && to < size && inverse[static_cast<std::size_t>(to)] < 0,
                 "an order must hold every number below {} once, got {} at {}", size, to, i);
    inverse[static_cast<std::size_t>(to)] = i;
  }
  return inverse;
}

ContextTables::ContextTables(std::span<const std::int64_t> cu_seqlens, std::int64_t cp_size,
                             std::int64_t cp_rank, std::int64_t local_rows)
    : cu_seqlens_(cu_seqlens.begin(), cu_seqlens.end()),
      positions_(context_parallel_positions(cu_seqlens, cp_size, cp_rank, local_rows)),
      key_order_(context_parallel_key_order(cu_seqlens, cp_size, local_rows)),
      inverse_(inverse_order(key_order_)) {
  geometry_ = {cp_size, cp_rank, local_rows, cu_seqlens.back() == local_rows * cp_size};
}

void ContextTables::refresh(std::span<const std::int64_t> cu_seqlens) {
  const ContextGeometry& g = geometry_;
  const ContextTables fresh(cu_seqlens, g.cp_size, g.cp_rank, g.local_rows);
  WINNOW_CHECK(kName, fresh.geometry_ == g,
               "tables are refreshed for equal geometry: these are of sequences that {} the {} "
               "rows of all ranks, and {} of them were given: make tables of their own",
               g.covers ? "fill" : "do not fill", keys(), cu_seqlens.back());
  cu_seqlens_.assign(cu_seqlens.begin(), cu_seqlens.end());
  std::ranges::copy(fresh.positions_, positions_.begin());
  std::ranges::copy(fresh.key_order_, key_order_.begin());
  std::ranges::copy(fresh.inverse_, inverse_.begin());
  ++version_;
}

}  // namespace winnow
