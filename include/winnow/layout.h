// Row ranges: which keys a query row sees. A row is the unit of every operation; causal, batched
// and packed sequences, chunked prefill and decode differ only in `starts` and `ends`. What breaks
// a rule throws winnow::Error.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace winnow {

struct RowRanges {
  std::vector<std::int32_t> starts, ends;  // row i sees the keys [starts[i], ends[i])
  std::int64_t rows() const { return static_cast<std::int64_t>(starts.size()); }
};

// One sequence whose first `context` keys are already there; row t is position context + t and sees
// the context + t + 1 keys up to itself (bottom-right alignment). context 0: plain causal.
RowRanges causal_ranges(std::int64_t rows, std::int64_t context = 0);

// Where the diagonal lies when one sequence has not as many rows as keys. Rows without a key are
// empty.
enum class CausalAlignment : std::uint8_t {
  kBottomRight,  // the last row is the last key: row t sees keys - rows + t + 1 of them.
                 // 2 rows of 5 keys: 4, 5; 5 rows of 2 keys: 0, 0, 0, 1, 2
  kTopLeft,      // the first row is the first key: row t sees t + 1 keys, at most all.
                 // 2 rows of 5 keys: 1, 2; 5 rows of 2 keys: 1, 2, 2, 2, 2
};

// One sequence of `rows` rows over `keys` keys. causal_ranges(rows, context) is bottom-right over
// context + rows keys.
RowRanges causal_ranges(std::int64_t rows, std::int64_t keys, CausalAlignment alignment);

// Causal sequences laid end to end, rows and keys alike: sequence g owns [cu_seqlens[g],
// cu_seqlens[g+1]). cu_seqlens must start at 0 and not fall; empty sequences are allowed. Rows from
// cu_seqlens.back() up to `rows` are padding: empty ranges.
RowRanges packed_ranges(std::span<const std::int32_t> cu_seqlens, std::int64_t rows);

// A batch of `batch` causal sequences of `length` tokens each: packed sequences of equal length.
RowRanges batched_ranges(std::int64_t batch, std::int64_t length);

// Whether these ranges prove that a selection gives every row at least one of `keys` keys: the word
// that sparse_attention_backward takes as `rows_nonempty`. It travels with the indices: a layer
// that reuses them may give it where the layer that computed them could and its own ranges prove
// it, too.
// - Plain selection: no row is empty. Padding rows are rows.
// - Pools (pool_size > 1): a row before its first whole pool selects nothing unless the unfinished
//   tail is always selected; without `select_tail` nothing is ever proved.
// - Ranges say nothing about scores: where scores may be NaN or -inf for all keys of a row, the row
//   selects nothing, and the word must not be given.
bool can_prove_all_rows_nonempty(std::span<const std::int32_t> starts,
                                 std::span<const std::int32_t> ends, std::int64_t keys,
                                 std::int64_t pool_size = 1, bool select_tail = false);

// A run of consecutive rows whose key tiles a kernel may share. `key_begin`, `key_end` cover the
// ranges of all its rows; row_count 0 is padding. What a kernel computes never depends on the
// blocks.
struct RowBlock {
  std::int32_t first_row = 0, row_count = 0;
  std::int32_t key_begin = 0, key_end = 0;
};

// Cuts rows into runs of at most `rows_per_block` rows with the same start and non-empty ranges
// (rows of one sequence); empty rows belong to no block. With capacity > 0 the result is padded
// with empty runs to that many, so that a captured launch can be replayed; more runs than that are
// an error.
std::vector<RowBlock> row_blocks(std::span<const std::int32_t> starts,
                                 std::span<const std::int32_t> ends, std::int64_t rows_per_block,
                                 std::int64_t capacity = 0);

}  // namespace winnow
