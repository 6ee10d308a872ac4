// Where the pools of a pass lie among its keys and which of them its rows select among, for indexers
// with a pool_size above 1 (winnow/pools.h). All layers of a pass have the same.
//
// Everything is in the order of the keys, whoever holds the rows: a rank with a part of the rows has
// the pools that these see, over the keys of all ranks.
#pragma once

#include <span>

#include "attention/pass.h"
#include "winnow/pools.h"

namespace winnow::attention {

// The sequences of rows that all see theirs from its first key on: one for each start, to the
// furthest end. Rows that do not are an error, for where their pools begin must be said. Without
// cu_seqlens, rows of one sequence are known by ranges that overlap.
TokenSpans spans_of(const RowRanges& rows, std::span<const std::int64_t> cu_seqlens = {});

// Owns what `Pools` shows.
class PoolTables {
 public:
  // Sequences that are there whole: pools begin anew with each span; no spans: as the rows say.
  void whole(const RowRanges& rows, std::span<const std::int64_t> cu_seqlens, TokenSpans spans,
             std::int64_t pool_size);
  // One sequence that grows by `rows` tokens behind `context` others; the pools begin at its first.
  void growing(std::int64_t context, std::int64_t rows, std::int64_t pool_size);

  // Valid until the next call of either.
  Pools view() const;

 private:
  RowRanges seen_;
  std::vector<std::int32_t> bases_, cu_seqlens_, context_, slots_;
  std::int64_t first_ = 0, count_ = 0;
};

}  // namespace winnow::attention
