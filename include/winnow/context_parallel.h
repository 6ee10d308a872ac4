// Context parallelism: which rows a rank holds, and the order of the keys that ranks gather.
//
// Every sequence is cut into 2 cp_size chunks of equal length; rank r holds the r-th and the r-th
// from the end, so that causal work is the same for all (zigzag). A rank's rows follow the
// sequences, of each the early chunk first. Rows of its buffer after the last of them are padding:
// their positions lie behind all sequences, each its own, ascending by rank and row.
//
// What breaks a rule throws winnow::Error: lengths must be multiples of 2 cp_size (with one rank,
// any), and the rows must fit the buffer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace winnow {

// int64 [local_rows]: where each row of a rank stands in the packed sequences [cu_seqlens[g],
// cu_seqlens[g + 1]), which lie end to end from 0. Empty sequences are allowed.
std::vector<std::int64_t> context_parallel_positions(std::span<const std::int64_t> cu_seqlens,
                                                     std::int64_t cp_size, std::int64_t cp_rank,
                                                     std::int64_t local_rows);

// int64 [local_rows * cp_size]: the row in the concatenation of all ranks' buffers that comes next
// in order of position. gathered[order[i]] is key i.
std::vector<std::int64_t> context_parallel_key_order(std::span<const std::int64_t> cu_seqlens,
                                                     std::int64_t cp_size, std::int64_t local_rows);

// inverse[order[i]] = i: what takes gradients of ordered keys back without atomics. Throws unless
// `order` holds every number below its size once.
std::vector<std::int64_t> inverse_order(std::span<const std::int64_t> order);

// What the tables of a rank are made for: tables of equal geometry are of equal size.
struct ContextGeometry {
  std::int64_t cp_size = 1, cp_rank = 0;
  std::int64_t local_rows = 0;  // of the rank's buffer, padding included
  bool covers = false;          // the sequences fill the buffers of all ranks: no padding rows
  bool operator==(const ContextGeometry&) const = default;
};

// The three tables of one rank and one micro-batch, made on the host where the batch is cut, so
// that no layer makes them again.
class ContextTables {
 public:
  ContextTables(std::span<const std::int64_t> cu_seqlens, std::int64_t cp_size,
                std::int64_t cp_rank, std::int64_t local_rows);

  // The tables of other sequences, in the memory that these lie in. Another geometry is an error,
  // and then nothing has changed. Whoever still has a backward to run with the old tables must run
  // it before: `version` tells the two apart.
  void refresh(std::span<const std::int64_t> cu_seqlens);

  const ContextGeometry& geometry() const { return geometry_; }
  std::int64_t keys() const { return geometry_.local_rows * geometry_.cp_size; }
  std::int64_t version() const { return version_; }  // how often they were refreshed
  std::span<const std::int64_t> cu_seqlens() const { return cu_seqlens_; }

  std::span<const std::int64_t> positions() const { return positions_; }  // [local_rows]
  std::span<const std::int64_t> key_order() const { return key_order_; }  // [keys]
  std::span<const std::int64_t> inverse() const { return inverse_; }      // [keys], of key_order

 private:
  ContextGeometry geometry_;
  std::int64_t version_ = 0;
  std::vector<std::int64_t> cu_seqlens_, positions_, key_order_, inverse_;
};

}  // namespace winnow
