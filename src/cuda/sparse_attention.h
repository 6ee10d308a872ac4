// What the two kernels of sparse_attention are given: plain values, copied into the launch.
#pragma once

#include "cuda/attention.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "winnow/sparse_attention.h"

namespace winnow::cuda {

// Strides in elements; channels have stride 1.
template <class T>
struct Attention {
  SlotLists slots;
  KeyPlaces key_places, value_places;
  const T *query, *key, *value;
  bool shared_value;  // the value is the first dim_v channels of the key
  std::int64_t query_row, query_head, key_head, value_head;
  std::int64_t rows;
  int kv_heads, group, dim_qk, dim_v;
  float scale;
  void* output;  // f32 if wide, else T
  bool wide;
  std::int64_t output_row, output_head;
  float* lse;
  std::int64_t lse_row, lse_head;
  bool query_vectors, key_vectors, value_vectors;  // rows begin at multiples of 16 bytes

  explicit Attention(const SparseAttentionArgs& a)
      : slots(a.topk_indices, a.topk_lengths, a.starts, a.ends, a.key.keys()),
        key_places(a.key, a.key.data),
        query(a.query.as<T>()),
        key(a.key.data.as<T>()),
        value(key),
        shared_value(a.value.empty()),
        query_row(a.query.strides[0]),
        query_head(a.query.strides[1]),
        key_head(a.key.data.strides[a.key.key_axis()]),
        value_head(key_head),
        rows(a.query.shape[0]),
        kv_heads(static_cast<int>(a.key.data.shape[a.key.key_axis()])),
        group(static_cast<int>(a.query.shape[1]) / kv_heads),
        dim_qk(static_cast<int>(a.query.shape[2])),
        dim_v(static_cast<int>(a.output.shape[2])),
        scale(static_cast<float>(a.softmax_scale)),
        output(a.output.data),
        wide(a.output.dtype == DType::kF32),
        output_row(a.output.strides[0]),
        output_head(a.output.strides[1]),
        lse(a.lse.as<float>()),
        lse_row(a.lse.strides[0]),
        lse_head(a.lse.strides[1]),
        query_vectors(has_vector_rows(a.query)),
        key_vectors(has_vector_rows(a.key.data)),
        value_vectors(key_vectors) {
    value_places = key_places;
    if (shared_value) return;
    value_places = KeyPlaces(a.key, a.value);
    value = a.value.as<T>();
    value_head = a.value.strides[a.key.key_axis()];
    value_vectors = has_vector_rows(a.value);
  }

  __device__ void store(std::int64_t row, int head, int channel, float x) const {
    const std::int64_t at = row * output_row + head * output_head + channel;
    if (wide) {
      static_cast<float*>(output)[at] = x;
    } else {
      static_cast<T*>(output)[at] = from_float<T>(x);
    }
  }
};

// Plain multiply-adds in f32, for f32 and for shapes beyond the tiles of the tensor cores. Takes
// all.
void run_plain_attention(const SparseAttentionArgs& a, cudaStream_t stream);

}  // namespace winnow::cuda
