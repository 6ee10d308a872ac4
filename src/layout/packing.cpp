#include "winnow/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace winnow {
namespace {

constexpr char kName[] = "packing";
constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();

void check_shape(const PackShape& shape) {
  WINNOW_CHECK(kName, shape.rows >= 0 && shape.rows <= kMaxRows,
               "rows must be from 0 to 2^31 - 1, got {}", shape.rows);
  WINNOW_CHECK(kName, shape.max_documents >= 1 && shape.max_documents <= kMaxRows,
               "max_documents must be from 1 to 2^31 - 1, got {}", shape.max_documents);
  WINNOW_CHECK(kName, shape.length_multiple >= 1, "length_multiple must be at least 1, got {}",
               shape.length_multiple);
  WINNOW_CHECK(kName, shape.rows % shape.length_multiple == 0,
               "rows must be a multiple of length_multiple = {}, got {}", shape.length_multiple,
               shape.rows);
}

// Rows that a document of this length takes.
std::int64_t padded(std::int64_t length, const PackShape& shape) {
  const std::int64_t multiple = shape.length_multiple;
  return length / multiple * multiple + (length % multiple == 0 ? 0 : multiple);
}

void check_length(std::int64_t document, std::int64_t length, const PackShape& shape) {
  WINNOW_CHECK(kName, length >= 0 && length <= shape.rows,
               "a document must have from 0 to rows = {} rows, got {} of document {}: cut it, or "
               "make packs longer",
               shape.rows, length, document);
}

}  // namespace

std::vector<std::vector<std::int64_t>> pack_documents(std::span<const std::int64_t> lengths,
                                                      const PackShape& shape) {
  check_shape(shape);
  const auto documents = static_cast<std::int64_t>(lengths.size());
  const auto length = [&](std::int64_t d) { return lengths[static_cast<std::size_t>(d)]; };
  for (std::int64_t d = 0; d < documents; ++d) check_length(d, length(d), shape);
  std::vector<std::int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return length(a) > length(b); });

  std::vector<std::vector<std::int64_t>> packs;
  std::set<std::pair<std::int64_t, std::size_t>> open;  // free rows, number of the pack
  for (const std::int64_t document : order) {
    const std::int64_t rows = padded(length(document), shape);
    if (rows == 0) continue;
    std::int64_t free = shape.rows;
    std::size_t pack = packs.size();
    if (const auto fullest = open.lower_bound({rows, 0}); fullest != open.end()) {
      std::tie(free, pack) = *fullest;
      open.erase(fullest);
    } else {
      packs.emplace_back();
    }
    packs[pack].push_back(document);
    if (std::ssize(packs[pack]) < shape.max_documents) open.insert({free - rows, pack});
  }
  return packs;
}

Pack lay_out_pack(std::span<const std::int64_t> lengths, const PackShape& shape) {
  check_shape(shape);
  const auto documents = static_cast<std::int64_t>(lengths.size());
  WINNOW_CHECK(kName, documents <= shape.max_documents,
               "a pack must hold at most max_documents = {} documents, got {}: put the others into "
               "the next pack",
               shape.max_documents, documents);
  Pack pack;
  pack.cu_seqlens = {0};
  for (std::int64_t d = 0; d < documents; ++d) {
    const std::int64_t begin = pack.cu_seqlens.back(),
                       length = lengths[static_cast<std::size_t>(d)];
    check_length(d, length, shape);
    const std::int64_t end = begin + padded(length, shape);
    WINNOW_CHECK(kName, end <= shape.rows,
                 "documents must fit into rows = {}, each padded to a multiple of {}, but document "
                 "{} would end at {}: put it into the next pack",
                 shape.rows, shape.length_multiple, d, end);
    pack.cu_seqlens.push_back(end);
    for (std::int64_t row = begin; row < end; ++row) {
      const bool real = row < begin + length;
      pack.ranges.starts.push_back(real ? static_cast<std::int32_t>(begin) : 0);
      pack.ranges.ends.push_back(real ? static_cast<std::int32_t>(row + 1) : 0);
      pack.positions.push_back(static_cast<std::int32_t>(row - begin));
      pack.real.push_back(real ? 1 : 0);
    }
  }
  const std::int64_t last = pack.cu_seqlens.back();
  const auto rows = static_cast<std::size_t>(shape.rows);
  for (std::int64_t row = last; row < shape.rows; ++row) {
    pack.positions.push_back(static_cast<std::int32_t>(row - last));
  }
  pack.ranges.starts.resize(rows, 0);
  pack.ranges.ends.resize(rows, 0);
  pack.real.resize(rows, 0);
  pack.cu_seqlens.resize(static_cast<std::size_t>(shape.max_documents) + 1, last);
  pack.cu_seqlens.push_back(shape.rows);
  return pack;
}

}  // namespace winnow
