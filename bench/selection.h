// What a selection writes, and its comparison: ids, lengths and the bits of the scores, exactly.
#pragma once

#include <vector>

#include "bench/case.h"
#include "bench/guarded.h"

namespace winnow::bench {

struct SelectionOutput {
  Guarded indices, lengths, scores;

  SelectionOutput() = default;
  SelectionOutput(std::int64_t rows, std::int64_t topk, DType score_dtype, bool with_scores);
  std::vector<Tensor> tensors() const;
};

std::vector<Comparison> compare_selections(const SelectionOutput& actual,
                                           const SelectionOutput& truth);

}  // namespace winnow::bench
