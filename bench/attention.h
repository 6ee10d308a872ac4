// Inputs of the problems of attention, and the truth about one query head in double with the error
// bounds of f32 arithmetic.
#pragma once

#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/guarded.h"
#include "bench/keys.h"
#include "bench/problem.h"

namespace winnow::bench {

std::vector<Parameter> attention_parameters();

struct AttentionInputs {
  // page > 0: the keys lie in pages, and the value in the same.
  explicit AttentionInputs(const Problem& p, std::int64_t page = 0);

  const Tensor& value_source() const { return shared_value ? key.data() : value.view(); }
  double key_at(std::int64_t row, std::int64_t id, std::int64_t g, std::int64_t d) const;
  double value_at(std::int64_t row, std::int64_t id, std::int64_t g, std::int64_t c) const;
  std::int64_t group() const { return heads / kv_heads; }
  Tensor value_or_nothing() const { return shared_value ? Tensor{} : value.view(); }
  Tensor indices_or_nothing() const { return topk == 0 ? Tensor{} : topk_indices.view(); }
  Tensor lengths_or_nothing() const { return with_lengths ? topk_lengths.view() : Tensor{}; }
  DType wide() const { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  // Ids of the slots of a row that count, in list order.
  std::vector<std::int64_t> slots(std::int64_t row) const;
  double pairs() const;           // counting slots over all rows
  double input_elements() const;  // query, key and value

  std::int64_t rows, keys, heads, kv_heads, dim_qk, dim_v, topk;
  bool shared_value, with_lengths;
  DType dtype;
  double softmax_scale;
  Keys key;
  Guarded query, value, topk_indices, topk_lengths, starts, ends;
};

// How far rounding to the dtype of an output moves a number of that magnitude, at most: subnormals
// keep their distance. 0 for f32 and f64, counted elsewhere.
double storage_error(DType dtype, double magnitude);

// One query head: logits of the counting slots with a bound on the error of each.
struct HeadLogits {
  std::vector<double> z, error;
  double lse;  // of z; -inf without a slot
};
HeadLogits head_logits(const AttentionInputs& in, std::int64_t row, std::int64_t head,
                       const std::vector<std::int64_t>& slots);

}  // namespace winnow::bench
