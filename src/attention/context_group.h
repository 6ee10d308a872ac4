// Context parallelism inside the layers: the ranks that hold the rows of one micro-batch between
// them, and the two exchanges that a layer makes with them.
//
// A rank's queries stay where they are; keys of all ranks are gathered and put in order of
// position, so that every operation sees what it sees without context parallelism: rows whose
// ranges are over all keys. The way back is the transpose: each rank has a gradient of all keys
// from its own rows; the inverse order takes it to the ranks' buffers, and every rank gets the sum
// of what belongs to its rows. Sums are formed in the order of the ranks: the bits of a run depend
// on the number of ranks, and on nothing else.
#pragma once

#include "attention/buffer.h"
#include "winnow/communicator.h"
#include "winnow/context_parallel.h"

namespace winnow::attention {

// Most bytes of an exchange that are in memory beside what is gathered or scattered: longer ones go
// in blocks of rows. No bit depends on it.
inline constexpr std::int64_t kExchangeBytes = std::int64_t{1} << 24;

class ContextGroup {
 public:
  // `ranks` must outlive it; the tables must be those of this rank among so many.
  ContextGroup(Communicator& ranks, ContextTables tables,
               std::int64_t exchange_bytes = kExchangeBytes);

  Communicator& ranks() const { return ranks_; }
  const ContextTables& tables() const { return tables_; }
  std::int64_t rows() const { return tables_.geometry().local_rows; }
  std::int64_t keys() const { return tables_.keys(); }

  // In place, for the next micro-batch of equal geometry (ContextTables::refresh).
  void refresh(std::span<const std::int64_t> cu_seqlens) { tables_.refresh(cu_seqlens); }

  // Throws on every rank, with what each has, unless all hold parts of the same sequences.
  void check_agreement() const;

  // all [keys, ...]: row i is the row at position i, from the ranks' mine [rows, ...]. Both
  // contiguous, apart, of any dtype.
  void gather(const Tensor& mine, const Tensor& all, Buffer& exchanged) const;
  // mine [rows, ...]: the sum over ranks of their all [keys, ...] at the positions of this rank's
  // rows. Both contiguous, f32 or f64.
  void scatter_sum(const Tensor& all, const Tensor& mine, Buffer& exchanged) const;

 private:
  std::int64_t rows_at_once(std::int64_t row_bytes) const;
  std::int64_t position(std::int64_t rank, std::int64_t row) const {
    return tables_.inverse()[static_cast<std::size_t>(rank * rows() + row)];
  }

  Communicator& ranks_;
  ContextTables tables_;
  const std::int64_t exchange_bytes_;
};

}  // namespace winnow::attention
