// Context parallelism: from the batch of all ranks to the rows of one.
//
// Every rank builds the whole batch, multi-token prediction's shifted tokens included, and takes
// its part: what a row reads and predicts never depends on where the cut falls.
#pragma once

#include "model/transformer.h"

namespace winnow::model {

// The same sequences, each with as many rows after its own as make its length a multiple of
// `multiple`. Those are empty rows: they see no key, have no loss, and no other row sees them. So
// are the rows after the last sequence, which are left out.
Batch pad_sequences(const Batch& batch, std::int64_t multiple);

// This rank's rows of a batch whose sequences are those of the context's tables: their lengths must
// be multiples of 2 cp_size. Rows of the rank's buffer that belong to no sequence are empty rows.
Batch cut_batch(const Batch& batch, std::shared_ptr<const attention::ContextGroup> context);

// Both: pads the sequences of the batch, which must say cu_seqlens, and cuts it for `ranks`, which
// must outlive the result. Every rank gets the same number of rows: `local_rows`, or, for 0, as many
// as it takes, and at least one. One rank gets the batch as it is.
Batch share_batch(Batch batch, Communicator& ranks, std::int64_t local_rows = 0);

// The way back, for whoever looks at what a model made of this rank's part of a batch: on every
// rank, the rows [rows, width] of all ranks in the order of the batch before share_batch; and the
// same of selections, whose ids become those of that batch's keys.
Array gather_rows(const Batch& batch, const Batch& mine, const Tensor& rows);
Array gather_selection(const Batch& batch, const Batch& mine, const Tensor& selection);

}  // namespace winnow::model
