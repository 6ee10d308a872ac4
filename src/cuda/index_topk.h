// index_topk on GPUs: a chunk of rows is scored into the workspace and selected from there, then the next.
//
// Selection reads a score in the time of about 1 % of what 64 heads of 128 channels take to make it, so
// a filter fused into the scorer could gain no more than that, and would need a repair; and a chunk of
// rows bounds the memory as a filter would. The selection is that of select_topk, exact on any data.
#pragma once

#include <algorithm>

#include "cuda/scorer.h"
#include "winnow/index_topk.h"
#include "winnow/select_topk.h"

namespace winnow::cuda {

// How a call is cut, and its workspace: scores and ends of the rows of a chunk, and what the scorer asks
// for beside them. It does not grow with the rows, nor with the keys while a row fits the budget.
struct ScoreChunks {
  static constexpr std::int64_t kDefaultBudget = 1ll << 30, kAlignment = 16, kRowGroup = 16;

  std::int64_t rows, keys, pitch;  // pitch: floats of a row of scores
  std::int64_t chunk = 0;          // rows of a chunk; the last may have fewer
  std::int64_t scorer_bytes = 0;

  // `scorer_bytes_of(rows)`: scratch of the scorer, not shrinking with more rows.
  template <class ScorerBytes>
  ScoreChunks(const IndexTopkArgs& a, ScorerBytes&& scorer_bytes_of)
      : rows(a.index_query.shape[0]), keys(a.index_key.keys()), pitch(up(keys, 4)) {
    if (rows == 0) return;
    const std::int64_t budget = a.workspace_budget > 0 ? a.workspace_budget : kDefaultBudget;
    chunk = std::clamp<std::int64_t>(budget / row_bytes(), 1, rows);
    scorer_bytes = scorer_bytes_of(chunk);
    const std::int64_t fitting = (budget - up(scorer_bytes, kAlignment) - kSlack) / row_bytes();
    chunk = std::clamp<std::int64_t>(fitting, 1, chunk);
    const std::int64_t count = (rows + chunk - 1) / chunk;  // of about equal size, whole groups
    chunk = std::min(chunk, up((rows + count - 1) / count, kRowGroup));
    scorer_bytes = scorer_bytes_of(chunk);
  }

  std::int64_t bytes() const {
    return rows == 0 ? 0 : up(scorer_bytes, kAlignment) + row_bytes() * chunk + kSlack;
  }

  struct Memory {
    float* scores;
    void* scorer;
    std::int32_t* ends;
  };
  Memory carve(void* workspace) const {
    const auto at = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(workspace));
    auto* scores = static_cast<unsigned char*>(workspace) + (up(at, kAlignment) - at);
    auto* scorer = scores + 4 * pitch * chunk;
    auto* ends = scorer + up(scorer_bytes, kAlignment);
    return {reinterpret_cast<float*>(scores), scorer, reinterpret_cast<std::int32_t*>(ends)};
  }

 private:
  static constexpr std::int64_t kSlack = kAlignment - 1;
  static std::int64_t up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
  std::int64_t row_bytes() const { return 4 * pitch + 4; }
};

// The ends of rows, clamped to the keys: select_topk knows no key space.
void clamp_ends(const Tensor& ends, std::int64_t keys, std::int32_t* clamped, cudaStream_t stream);

// score(scorer) queues the scores of the rows that it says; select(args) their selection.
template <class Score, class Select>
void index_topk_in_chunks(const IndexTopkArgs& a, const ScoreChunks& chunks,
                          const ScoreChunks::Memory& memory, cudaStream_t stream, Score&& score,
                          Select&& select) {
  const Device device = a.index_query.device;
  Scorer scorer = Scorer::of(a);
  scorer.scores = memory.scores;
  scorer.score_row = chunks.pitch;
  scorer.width = chunks.keys;
  for (std::int64_t first = 0; first < chunks.rows; first += chunks.chunk) {
    const std::int64_t count = std::min(chunks.chunk, chunks.rows - first);
    scorer.first_row = first;
    scorer.last_row = first + count;
    score(scorer);
    clamp_ends(a.ends.rows(first, count), chunks.keys, memory.ends, stream);
    SelectTopkArgs args;
    args.scores = make_tensor(memory.scores, DType::kF32, {count, chunks.keys}, device);
    args.scores.strides[0] = chunks.pitch;
    args.starts = a.starts.rows(first, count);
    args.ends = make_tensor(memory.ends, DType::kI32, {count}, device);
    args.topk_indices = a.topk_indices.rows(first, count);
    args.topk_lengths = a.topk_lengths.rows(first, count);
    if (!a.topk_scores.empty()) args.topk_scores = a.topk_scores.rows(first, count);
    args.keep_minus_inf = a.keep_minus_inf;
    args.keep_first = a.keep_first;
    args.keep_last = a.keep_last;
    select(args);
  }
}

}  // namespace winnow::cuda
