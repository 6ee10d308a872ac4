// Calls of sparse_attention and its backward on small inputs, for the tests of both.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/array.h"
#include "bench/data.h"
#include "winnow/error.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"
#include "winnow/threads.h"

namespace winnow {

struct AttentionCall {
  std::int64_t rows, keys, heads, kv_heads, dim_qk, dim_v;
  Array query, key, value, ids, lengths, starts, ends;  // empty: left out
  double scale = 0.25;
  Array output, lse, d_output, d_query, d_key, d_value;

  // Every row sees all keys; no lists; topk 0: dense.
  AttentionCall(std::int64_t rows_, std::int64_t keys_, std::int64_t heads_, std::int64_t kv_heads_,
                std::int64_t dim_qk_, std::int64_t dim_v_, bool separate_value = false,
                DType dtype = DType::kF32)
      : rows(rows_),
        keys(keys_),
        heads(heads_),
        kv_heads(kv_heads_),
        dim_qk(dim_qk_),
        dim_v(dim_v_),
        query(dtype, {rows, heads, dim_qk}),
        key(dtype, {keys, kv_heads, dim_qk}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}) {
    bench::Random random(7);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    if (separate_value) {
      value = Array(dtype, {keys, kv_heads, dim_v});
      bench::fill_gauss(value, random);
    }
    for (std::int64_t i = 0; i < rows; ++i) ends.as<std::int32_t>()[i] = static_cast<int>(keys);
    const DType wide = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    output = Array(dtype, {rows, heads, dim_v});
    lse = Array(wide, {rows, heads});
    d_output = Array(dtype, {rows, heads, dim_v});
    bench::fill_gauss(d_output, random);
    d_query = Array(wide, {rows, heads, dim_qk});
    d_key = Array(wide, {keys, kv_heads, dim_qk});
    if (separate_value) d_value = Array(wide, {keys, kv_heads, dim_v});
  }

  void list(std::int64_t topk, const std::vector<std::int32_t>& all) {
    ids = Array(DType::kI32, {rows, topk});
    std::memcpy(ids.as<void>(), all.data(), all.size() * sizeof(std::int32_t));
  }
  void see(std::int64_t row, int start, int end) {
    starts.as<std::int32_t>()[row] = start;
    ends.as<std::int32_t>()[row] = end;
  }

  SparseAttentionArgs forward_args() const {
    return {query, key, value, ids, lengths, starts, ends, scale, output, lse};
  }
  SparseAttentionBackwardArgs backward_args() const {
    return {query, key,    value, ids,      lengths, starts, ends,
            scale, output, lse,   d_output, d_query, d_key,  d_value};
  }
  void forward() const { forward(forward_args()); }
  void backward() const { backward(backward_args()); }
  static void forward(const SparseAttentionArgs& args) {
    Scratch scratch;
    sparse_attention(args, scratch.get(sparse_attention_workspace_bytes(args)));
  }
  static void backward(const SparseAttentionBackwardArgs& args) {
    Scratch scratch;
    sparse_attention_backward(args, scratch.get(sparse_attention_backward_workspace_bytes(args)));
  }
};

// Runs `body` once with every implementation of `operation` that accepts the call.
inline void with_each(const Explanation& explanation,
                      const std::function<void(const std::string&)>& body) {
  for (const Verdict& v : explanation.verdicts) {
    if (!v.refusal.empty()) continue;
    pin_implementation(explanation.operation, v.implementation);
    body(v.implementation);
    pin_implementation(explanation.operation, "");
  }
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.elements() == b.elements() && a.dtype == b.dtype &&
         std::memcmp(a.data, b.data,
                     static_cast<std::size_t>(a.elements() * dtype_bytes(a.dtype))) == 0;
}

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace winnow
