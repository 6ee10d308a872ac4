// Packing: documents laid end to end into packs of a fixed number of rows.
//
// A pack has the same shape whatever it holds: `rows` rows and max_documents + 2 boundaries, so that
// tables and captured launches made for one pack serve every other. A document takes its length,
// rounded up to length_multiple; the rows that this adds, and the rows after the last document (the
// tail), are padding. Padding sees nothing and nothing sees it: its ranges are empty, it has no
// target, and it adds 0 to every loss and gradient. What breaks a rule throws winnow::Error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/layout.h"

namespace winnow {

struct PackShape {
  std::int64_t rows = 0;             // of a pack, padding included; a multiple of length_multiple
  std::int64_t max_documents = 0;    // in a pack
  std::int64_t length_multiple = 1;  // 2 cp_size where packs are cut for context parallelism
};

// Which documents share a pack, by number. The longest go first, each into the fullest pack that
// has room for it and fewer than max_documents; a new pack begins where none has. Documents of
// length 0 are in no pack; one that is longer than a pack is an error: cut it first.
std::vector<std::vector<std::int64_t>> pack_documents(std::span<const std::int64_t> lengths,
                                                      const PackShape& shape);

struct Pack {
  // [max_documents + 2]: sequence g is the rows [cu_seqlens[g], cu_seqlens[g + 1]). The documents
  // come first, padded lengths; then empty sequences up to max_documents; the last sequence is the
  // tail, so that the sequences fill the pack.
  std::vector<std::int64_t> cu_seqlens;
  std::vector<std::int32_t> positions;  // [rows], from the begin of the row's sequence
  std::vector<std::uint8_t> real;       // [rows]: 1 for rows of documents, 0 for padding
  RowRanges ranges;                     // [rows]: causal inside a document; empty for padding
};

// Lays these documents into one pack, in the order in which they come. Lengths of 0 are allowed.
// More documents than max_documents, or than the rows hold, are an error.
Pack lay_out_pack(std::span<const std::int64_t> lengths, const PackShape& shape);

}  // namespace winnow
