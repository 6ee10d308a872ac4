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

class ContextGroup {
 public:
  // `ranks` must outlive it; the tables must be those of this rank among so many.
  ContextGroup(Communicator& ranks, ContextTables tables);

  Communicator& ranks() const { return ranks_; }
  const ContextTables& tables() const { return tables_; }
  std::int64_t rows() const { return tables_.geometry().local_rows; }
  std::int64_t keys() const { return tables_.keys(); }

  // In place, for the next micro-batch of equal geometry (ContextTables::refresh).
  void refresh(std::span<const std::int64_t> cu_seqlens) { tables_.refresh(cu_seqlens); }

  // Throws on every rank, with what each has, unless all hold parts of the same sequences.
  void check_agreement() const;

  // all [keys, ...]: row i is the row at position i, from the ranks' mine [rows, ...]. Both
  // contiguous, of any dtype. `exchanged` holds the rows in the order of the ranks meanwhile.
  void gather(const Tensor& mine, const Tensor& all, Buffer& exchanged) const;
  // mine [rows, ...]: the sum over ranks of their all [keys, ...] at the positions of this rank's
  // rows. Both contiguous, f32 or f64.
  void scatter_sum(const Tensor& all, const Tensor& mine, Buffer& exchanged) const;

 private:
  Communicator& ranks_;
  ContextTables tables_;
};

}  // namespace winnow::attention
