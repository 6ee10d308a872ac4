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

// How a call is cut, and its workspace: the scores of a chunk, the ends of all rows, and what the scorer
// asks for beside them.
struct ScoreChunks {
  static constexpr std::int64_t kDefaultBudget = 1ll << 30, kAlignment = 16, kRowGroup = 16;

  std::int64_t rows, keys, pitch;  // pitch: floats of a row of scores
  std::int64_t chunk = 0;          // rows of a chunk; the last may have fewer
  std::int64_t scorer_bytes = 0;

  // `scorer_bytes_of(rows)`: scratch of the scorer, growing with the rows.
  template <class ScorerBytes>
  ScoreChunks(const IndexTopkArgs& a, ScorerBytes&& scorer_bytes_of)
      : rows(a.index_query.shape[0]), keys(a.index_key.keys()), pitch((keys + 3) / 4 * 4) {
    if (rows == 0 || keys == 0) return;
    scorer_bytes = scorer_bytes_of(rows);
    const std::int64_t budget = a.workspace_budget > 0 ? a.workspace_budget : kDefaultBudget;
    const std::int64_t most = (budget - fixed_bytes()) / (4 * pitch);
    chunk = std::clamp<std::int64_t>(most, 1, rows);
    const std::int64_t count = (rows + chunk - 1) / chunk;  // of about equal size, whole groups
    const std::int64_t even = (rows + count - 1) / count;
    chunk = std::min(chunk, (even + kRowGroup - 1) / kRowGroup * kRowGroup);
  }

  std::int64_t bytes() const { return fixed_bytes() + 4 * pitch * chunk; }

  struct Memory {
    float* scores;
    std::int32_t* ends;
    void* scorer;
  };
  Memory carve(void* workspace) const {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace);
    auto* p =
        static_cast<unsigned char*>(workspace) + (kAlignment - address % kAlignment) % kAlignment;
    auto* scorer = p + 4 * pitch * chunk;
    return {reinterpret_cast<float*>(p),
            reinterpret_cast<std::int32_t*>(scorer + aligned(scorer_bytes)), scorer};
  }

 private:
  static std::int64_t aligned(std::int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::int64_t fixed_bytes() const { return aligned(scorer_bytes) + 4 * rows + kAlignment - 1; }
};

// The ends of all rows, clamped to the keys: select_topk knows no key space.
void clamp_ends(const IndexTopkArgs& a, std::int32_t* ends, cudaStream_t stream);

// score(scorer) queues the scores of the rows that it says; select(args) their selection.
template <class Score, class Select>
void index_topk_in_chunks(const IndexTopkArgs& a, const ScoreChunks& chunks,
                          const ScoreChunks::Memory& memory, cudaStream_t stream, Score&& score,
                          Select&& select) {
  if (chunks.rows == 0) return;
  const Device device = a.index_query.device;
  clamp_ends(a, memory.ends, stream);
  Scorer scorer = Scorer::of(a);
  scorer.scores = memory.scores;
  scorer.score_row = chunks.pitch;
  scorer.width = chunks.keys;
  const std::int64_t step = chunks.chunk > 0 ? chunks.chunk : chunks.rows;
  for (std::int64_t first = 0; first < chunks.rows; first += step) {
    const std::int64_t count = std::min(step, chunks.rows - first);
    scorer.first_row = first;
    scorer.last_row = first + count;
    score(scorer);
    SelectTopkArgs args;
    args.scores = make_tensor(memory.scores, DType::kF32, {count, chunks.keys}, device);
    args.scores.strides[0] = chunks.pitch;
    args.starts = a.starts.rows(first, count);
    args.ends = make_tensor(memory.ends + first, DType::kI32, {count}, device);
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
