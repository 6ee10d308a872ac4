// The one selection rule, in double: candidates are offered in any order, the k best remain.
#pragma once

#include <algorithm>
#include <cmath>

#include "ref/reader.h"

namespace winnow::ref {

struct Candidate {
  double score;
  std::int64_t id;
};

// Larger scores first, then lower ids; +0 and -0 are equal.
inline bool better(const Candidate& a, const Candidate& b) {
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
  Selection(Workspace workspace, std::int64_t topk, std::int64_t keys)
      : capacity_(std::min(topk, keys)) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data);
    kept_ = reinterpret_cast<Candidate*>((address + alignof(Candidate) - 1) / alignof(Candidate) *
                                         alignof(Candidate));
  }

  void offer(double score, std::int64_t id) {
    if (!(score > -INFINITY)) return;  // NaN and -inf
    const Candidate candidate{score, id};
    if (size_ == capacity_) {
      if (!better(candidate, kept_[0])) return;
      std::pop_heap(kept_, kept_ + size_, better);
      --size_;
    }
    kept_[size_++] = candidate;
    std::push_heap(kept_, kept_ + size_, better);
  }

  // Writes row i: ids ascending, -1 and -inf after the last. `scores` may be left out.
  void write(const Tensor& indices, const Tensor& lengths, const Tensor& scores, std::int64_t i) {
    std::sort(kept_, kept_ + size_,
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    for (std::int64_t s = 0; s < indices.shape[1]; ++s) {
      const bool valid = s < size_;
      indices.as<std::int32_t>()[i * indices.strides[0] + s * indices.strides[1]] =
          valid ? static_cast<std::int32_t>(kept_[s].id) : -1;
      if (!scores.empty()) set(scores, i, s, valid ? kept_[s].score : -INFINITY);
    }
    lengths.as<std::int32_t>()[i * lengths.strides[0]] = static_cast<std::int32_t>(size_);
  }

 private:
  Candidate* kept_;
  std::int64_t capacity_, size_ = 0;
};

}  // namespace winnow::ref
