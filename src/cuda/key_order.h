// Sums over everybody who selected a key, without atomics: the entries (row, slot) of a few rows in
// the order of their keys, and the rows of numbers that belong to the entries added up key by key.
//
// Entry e = row * slots + slot. Entries of one key stay in ascending order, so a key's sum is one
// chain over the query rows, whatever the number of rows that are sorted at a time. Rows may be
// sorted in groups, each with entries and keys of its own: fewer launches.
#pragma once

#include "cuda/attention.h"
#include "cuda/carve.h"
#include "cuda/kernel.h"

namespace winnow::cuda {

class KeyOrder {
 public:
  // For up to `rows` rows of `slots` slots over `keys` keys; 0: they are one group.
  KeyOrder(Carve& carve, std::int64_t rows, std::int64_t slots, std::int64_t keys,
           std::int64_t group_rows = 0);
  // What an entry takes of the workspace, in bytes, nearly: for budgets.
  static constexpr std::int64_t kEntryBytes = 16;

  // Sorts the entries of rows [first, first + rows) and counts the slots of each row up to the last
  // that counts, into counts()[row - first].
  void sort(const char* operation, const SlotLists& lists, std::int64_t first, std::int64_t rows,
            cudaStream_t stream);
  const std::int32_t* counts() const { return counts_; }
  // The sorted entries; those of key j of group g are [begins[i], begins[i + 1]), with i =
  // g (keys + 1) + j, which `find_keys` fills in: begins holds keys + 1 numbers for each group.
  const std::uint32_t* entries() const { return entry_[0]; }
  void find_keys(const char* operation, std::uint32_t* begins, cudaStream_t stream) const;

  // Where the sums of a key go: channel c < split of head g to a[key, g, c], the others to
  // b[key, g, c - split]. Strides in elements.
  struct Sums {
    float *a, *b;
    std::int64_t a_key, a_head, b_key, b_head;
    int heads, channels, split;  // channels: of a head, in both
  };
  // sums[key] += rows[entry] over the sorted entries; rows are [entries][heads][channels].
  void add(const char* operation, const float* rows, const Sums& sums, cudaStream_t stream) const;
  // All sums of `keys` keys become 0.
  static void clear(const char* operation, std::int64_t keys, const Sums& sums,
                    cudaStream_t stream);

 private:
  std::int64_t slots_, keys_, group_rows_, entries_ = 0, sorted_keys_ = 0, blocks_;
  std::uint32_t *key_[2], *entry_[2];  // the sorted ones are in [0] after sort
  std::uint32_t* digits_;  // [256][blocks]: how often, then where from among the same digits
  std::uint32_t* totals_;  // [256]
  std::int32_t* counts_;
};

}  // namespace winnow::cuda
