// What sparse_attention_backward and index_scores_at_backward share: from weights of pairs (head,
// slot) to the gradients of queries and keys, a few rows at a time.
//
//   query gradient   d_query[head, :] = sum over slots of dz[head, slot] * key[slot, :]
//   slot rows        row[slot, :]     = sum over heads of dz[head, slot] * query[head, :], and of
//                                       p[head, slot] * d_output[head, :]
//   key gradients    the rows of all slots with one key, added up in the order of KeyOrder
//
// Weights lie as [row][head][slots rounded up to 64], and are 0 at slots that do not count, up to
// the row's trimmed count rounded up to 64; behind it nobody reads.
#pragma once

#include <type_traits>

#include "cuda/key_order.h"
#include "cuda/outer_tile.h"

namespace winnow::cuda {

// What is multiplied: BF16 on tensor cores; f32 for f32, and for f16, whose range does not hold
// gradients.
template <class T>
using Multiplied = std::conditional_t<std::is_same_v<T, BF16>, BF16, float>;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}
constexpr int tiles_of(std::int64_t n, int tile) { return static_cast<int>((n + tile - 1) / tile); }

// [rows, heads, channels] in memory; strides in elements, channels have stride 1.
template <class T>
struct HeadRows {
  const T* data = nullptr;
  std::int64_t row = 0, head = 0;
  int channels = 0;
  bool vectors = false;

  HeadRows() = default;
  // Of rank 3, or [rows, channels] as of one head.
  explicit HeadRows(const Tensor& t)
      : data(t.as<T>()),
        row(t.strides[0]),
        head(t.rank == 3 ? t.strides[1] : 0),
        channels(static_cast<int>(t.shape[t.rank - 1])),
        vectors(has_vector_rows(t)) {}
  __device__ const T* operator()(std::int64_t i, std::int64_t h) const {
    return data + i * row + h * head;
  }
};

// The rows [first, first + rows) of a call.
template <class T>
struct BackwardChunk {
  using N = Multiplied<T>;
  SlotLists slots;
  const std::int32_t* counts;  // of KeyOrder
  std::int64_t first, rows;
  std::int64_t list_slots, padded_slots;  // of a row's list; rounded up to 64
  int kv_heads, group;
  HeadRows<T> query, key;         // key: [keys, kv_heads, dim_qk]
  const N *dz, *p;                // p null: only the part of dz
  HeadRows<T> d_output;           // [rows, heads, dim_v]
  HeadRows<float> wide_d_output;  // the same, if it is in f32 and T is not
  bool wide;
  int value_channels;  // dim_v; 0 without p
  bool shared;         // the part of p is added to the first channels of the part of dz
  bool adds = false;   // to what d_query holds
  float* d_query;
  std::int64_t d_query_row, d_query_head;
  float* slot_rows;  // [row * list_slots + slot][kv_heads][width]

  // Channels that a slot brings to each key head.
  __host__ __device__ int width() const { return query.channels + (shared ? 0 : value_channels); }
  __device__ std::int64_t weights_at(std::int64_t local_row, std::int64_t head) const {
    return (local_row * kv_heads * group + head) * padded_slots;
  }
};

// Both of d_query and slot_rows.
template <class T>
void run_backward_chunk(const char* operation, const BackwardChunk<T>& chunk, cudaStream_t stream);

}  // namespace winnow::cuda
