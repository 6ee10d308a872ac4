// The one selection rule, in double: candidates are offered in any order, the k best remain.
#pragma once

#include <algorithm>
#include <cmath>

#include "ref/reader.h"

namespace winnow::ref {

struct Candidate {
  double score;
  std::int64_t id;
  bool kept;  // a member whatever its score
};

// Kept keys first, then larger scores, then lower ids; +0 and -0 are equal.
inline bool better(const Candidate& a, const Candidate& b) {
  if (a.kept != b.kept) return a.kept;
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Room for the candidates of one row: no more than there are keys.
inline std::int64_t selection_bytes(std::int64_t topk, std::int64_t keys) {
  return std::min(topk, keys) * static_cast<std::int64_t>(sizeof(Candidate)) +
         static_cast<std::int64_t>(alignof(Candidate)) - 1;
}

// Keeps the k best of what it is offered, the worst of them in front (a heap).
class Selection {
 public:
  // `args`: SelectTopkArgs or IndexTopkArgs; `range`: the row's.
  template <class Args>
  Selection(Workspace workspace, std::int64_t keys, const Args& args, RowRange range)
      : range_(range),
        keep_first_(args.keep_first),
        keep_last_(args.keep_last),
        keep_minus_inf_(args.keep_minus_inf),
        capacity_(std::min(args.topk_indices.shape[1], keys)) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
    best_ = reinterpret_cast<Candidate*>((address + alignof(Candidate) - 1) / alignof(Candidate) *
                                         alignof(Candidate));
  }

  void offer(double score, std::int64_t id) {
    const bool kept = id < range_.start + keep_first_ || id >= range_.end - keep_last_;
    if (std::isnan(score) || (score == -INFINITY && !keep_minus_inf_ && !kept)) return;
    const Candidate candidate{score, id, kept};
    if (size_ == capacity_) {
      if (!better(candidate, best_[0])) return;
      std::pop_heap(best_, best_ + size_, better);
      --size_;
    }
    best_[size_++] = candidate;
    std::push_heap(best_, best_ + size_, better);
  }

  // Writes row i: ids ascending, -1 and -inf after the last. `scores` may be left out.
  void write(const Tensor& indices, const Tensor& lengths, const Tensor& scores, std::int64_t i) {
    std::sort(best_, best_ + size_,
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    for (std::int64_t s = 0; s < indices.shape[1]; ++s) {
      const bool valid = s < size_;
      indices.as<std::int32_t>()[i * indices.strides[0] + s * indices.strides[1]] =
          valid ? static_cast<std::int32_t>(best_[s].id) : -1;
      if (!scores.empty()) set(scores, i, s, valid ? best_[s].score : -INFINITY);
    }
    lengths.as<std::int32_t>()[i * lengths.strides[0]] = static_cast<std::int32_t>(size_);
  }

 private:
  RowRange range_;
  std::int64_t keep_first_, keep_last_;
  bool keep_minus_inf_;
  Candidate* best_;
  std::int64_t capacity_, size_ = 0;
};

}  // namespace winnow::ref
