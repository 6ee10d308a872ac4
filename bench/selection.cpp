#include "bench/selection.h"

#include <cstring>

#include "bench/bounds.h"
#include "ref/reader.h"

namespace winnow::bench {

SelectionOutput::SelectionOutput(std::int64_t rows, std::int64_t topk, DType score_dtype,
                                 bool with_scores)
    : indices(DType::kI32, {rows, topk}), lengths(DType::kI32, {rows}) {
  if (with_scores) scores = Guarded(score_dtype, {rows, topk});
}

std::vector<Tensor> SelectionOutput::tensors() const {
  std::vector<Tensor> all = {indices, lengths};
  if (!scores.view().empty()) all.push_back(scores);
  return all;
}

std::vector<Comparison> compare_selections(const SelectionOutput& actual,
                                           const SelectionOutput& truth) {
  Worst ids("topk_indices"), lengths("topk_lengths"), scores("topk_scores");
  const std::int64_t rows = truth.indices.view().shape[0], topk = truth.indices.view().shape[1];
  auto id = [](const Tensor& t, std::int64_t i) { return t.as<std::int32_t>()[i]; };
  for (std::int64_t i = 0; i < rows; ++i) {
    lengths.add_exact(id(actual.lengths, i) == id(truth.lengths, i), [&] {
      return fmt::format("row {}: {} instead of {}", i, id(actual.lengths, i),
                         id(truth.lengths, i));
    });
    for (std::int64_t n = i * topk; n < (i + 1) * topk; ++n) {
      ids.add_exact(id(actual.indices, n) == id(truth.indices, n), [&] {
        return fmt::format("row {} slot {}: {} instead of {}", i, n - i * topk,
                           id(actual.indices, n), id(truth.indices, n));
      });
      const Tensor& payload = truth.scores;
      if (payload.empty()) continue;
      const std::int64_t bytes = dtype_bytes(payload.dtype);
      const bool equal =
          std::memcmp(actual.scores.view().as<char>() + n * bytes, payload.as<char>() + n * bytes,
                      static_cast<std::size_t>(bytes)) == 0;
      scores.add_exact(equal, [&] {
        return fmt::format("row {} slot {}: {} instead of {}", i, n - i * topk,
                           load_double(actual.scores.view().data, payload.dtype, n),
                           load_double(payload.data, payload.dtype, n));
      });
    }
  }
  return {ids.comparison(), lengths.comparison(), scores.comparison()};
}

}  // namespace winnow::bench
