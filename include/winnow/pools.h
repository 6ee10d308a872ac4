// Pools of KPool: which tokens they hold, which of them a row sees, where they lie in pages.
//
// A pool is `pool_size` tokens in a row, of one sequence; only whole pools exist. Pools have a key
// space of their own:
//
//   pools = pool_layout(packed_spans(cu_seqlens), 4)         where they begin
//   rows  = packed_ranges(cu_seqlens, n)                     what a row sees, in tokens
//   seen  = pool_ranges(pools, rows)                         and in pools
//   pool_keys(index_key, gate, ape, pools.bases)             -> pooled_key
//   index_topk(index_query, pooled_key, weights, seen)       -> pool_indices
//   expand_pools(pool_indices, pools.bases, rows)            -> topk_indices of sparse_attention
//
// Sequences that grow: append_pools in place of pool_keys, into pages at pool_slots; ranges and
// tokens are positions inside a request then, and expand_pools needs no bases.
//
// What breaks a rule throws winnow::Error. Source: KPool of Megatron Core (dsa_indexer_kpool).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/layout.h"

namespace winnow {

// Sequences in one token space: sequence g owns the tokens [begins[g], ends[g]). They ascend and do
// not overlap; tokens between them belong to nobody (padding).
struct TokenSpans {
  std::vector<std::int32_t> begins, ends;
};

// Sequences laid end to end, empty ones included.
TokenSpans packed_spans(std::span<const std::int32_t> cu_seqlens);

// The valid tokens of each sample of a padded batch, from its mask [batch, length] (0: padding);
// token t of sample b is b * length + t. Padding may stand on both sides. A mask with a gap is
// refused: the pools of its tokens are nobody's agreed rule.
TokenSpans valid_spans(std::span<const std::uint8_t> mask, std::int64_t batch, std::int64_t length);

// What the rows of an explicit mask [batch, rows, keys] see (0: not visible); key s of sample b is
// b * keys + s. `rows` has one range for each row of each sample, `spans` what any row of a sample
// sees: its pools begin at the first key that is visible to any of its rows. A row with a gap is
// refused.
struct MaskedRows {
  RowRanges rows;
  TokenSpans spans;
};
MaskedRows masked_rows(std::span<const std::uint8_t> mask, std::int64_t batch, std::int64_t rows,
                       std::int64_t keys);

// Every token of a span is a row that sees its span up to itself. Rows [0, rows) of no span are
// padding: empty ranges.
RowRanges causal_ranges(const TokenSpans& spans, std::int64_t rows);

// The pools of sequences: they begin anew with each, and the rest of a sequence, fewer than
// pool_size tokens, is in none.
struct PoolLayout {
  std::int64_t pool_size = 1;
  TokenSpans spans;
  std::vector<std::int32_t> bases;       // [pools]: first token of each pool, ascending
  std::vector<std::int32_t> first_pool;  // [sequences + 1]: sequence g has the pools from here on
};
PoolLayout pool_layout(TokenSpans spans, std::int64_t pool_size);

// The pools that rows select among: those whose last token the row sees. A row that starts where
// its sequence does sees (end - start) / pool_size pools. Each row must stay in one sequence.
RowRanges pool_ranges(const PoolLayout& pools, const RowRanges& rows);

// The same for positions inside requests, whose pools begin at position 0: pool p holds the tokens
// from p * pool_size on.
RowRanges pool_ranges(const RowRanges& rows, std::int64_t pool_size);

// Pools of a page of page_size tokens, which pool_size must divide: a page of tokens and its page
// of pools have one id and one block table.
std::int64_t pools_per_page(std::int64_t page_size, std::int64_t pool_size);

// For append_pools: of each new token, at the positions context, context + 1, ... of a request with
// this row of the block table, the slot of the pool that it completes, or -1. A position past the
// table, or one whose page is negative, is an error.
std::vector<std::int32_t> pool_slots(std::span<const std::int32_t> block_table,
                                     std::int64_t page_size, std::int64_t pool_size,
                                     std::int64_t context, std::int64_t tokens);

}  // namespace winnow
