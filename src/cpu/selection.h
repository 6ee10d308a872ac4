// What select_topk and index_topk share around a TopkStream: rows of the outputs, keys that a row
// keeps whatever their score, arrays of streams, and parts of rows that several tasks stream.
#pragma once

#include "base/parallel.h"
#include "base/row_range.h"
#include "cpu/topk_stream.h"

namespace winnow::cpu::WINNOW_ISA {

// As parallel_for, by at most `lanes` threads at a time: body(task, lane), and what a lane owns is
// used by one of them.
template <class Body>
void parallel_lanes(std::int64_t tasks, std::int64_t lanes, Body&& body) {
  std::int64_t next = 0;
  parallel_for(lanes, [&](std::int64_t lane, int) {
    auto take = [&] { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); };
    for (std::int64_t task = take(); task < tasks; task = take()) body(task, lane);
  });
}

// One row of the outputs.
struct TopkRow {
  std::int32_t* ids;  // [topk], -1 after the last
  std::int32_t* length;
  float* scores;  // [topk], -inf after the last; null if they are not wanted
  std::int64_t topk;

  WINNOW_INLINE void put(std::int64_t slot, std::int32_t id, float score) const {
    ids[slot] = id;
    if (scores != nullptr) scores[slot] = score;
  }
  WINNOW_INLINE void move(std::int64_t from, std::int64_t to) const {
    put(to, ids[from], scores != nullptr ? scores[from] : 0);
  }
};

inline TopkRow row_of(const Tensor& indices, const Tensor& lengths, const Tensor& scores,
                      std::int64_t row) {
  return {indices.as<std::int32_t>() + row * indices.strides[0],
          lengths.as<std::int32_t>() + row * lengths.strides[0],
          scores.empty() ? nullptr : scores.as<float>() + row * scores.strides[0],
          indices.shape[1]};
}

// The first and the last keys of a row, members whatever their score unless it is NaN. The others
// compete for the places that these leave. Until the row is written, kept keys stand at both ends
// of the output row, where nothing else does: id -1 for one that is NaN.
class KeptKeys {
 public:
  KeptKeys() = default;
  KeptKeys(RowRange range, std::int64_t first, std::int64_t last)
      : range_(range),
        first_(min64(first, range.length())),
        last_(min64(last, range.length() - first_)) {}

  RowRange rest() const { return {range_.start + first_, range_.end - last_}; }

  // Takes a key that is kept.
  void put(float score, std::int64_t key, const TopkRow& row) const {
    const bool front = key < range_.start + first_;
    const std::int64_t slot = front ? key - range_.start : row.topk - (range_.end - key);
    row.put(slot, score == score ? static_cast<std::int32_t>(key) : -1, score);
  }
  // Takes those of the keys key, key + 1, ..., with these scores, that are kept.
  void put(const float* scores, std::int64_t n, std::int64_t key, const TopkRow& row) const {
    for (std::int64_t j = key; j < min64(key + n, rest().start); ++j) put(scores[j - key], j, row);
    for (std::int64_t j = max64(key, rest().end); j < min64(key + n, range_.end); ++j)
      put(scores[j - key], j, row);
  }

  // The whole row, ids ascending: kept keys, the best of the stream between them.
  void write(TopkStream& stream, const TopkRow& row) const {
    std::int64_t front = 0, back = row.topk;  // kept keys in [0, front) and [back, topk)
    for (std::int64_t s = 0; s < first_; ++s) {
      if (row.ids[s] >= 0) row.move(s, front++);
    }
    for (std::int64_t s = row.topk - 1; s >= row.topk - last_; --s) {
      if (row.ids[s] >= 0) row.move(s, --back);
    }
    const std::int64_t count = stream.finish(back - front);
    for (std::int64_t i = 0; i < count; ++i)
      row.put(front + i, stream.ids()[i], stream.scores()[i]);
    std::int64_t n = front + count;
    for (; back < row.topk; ++back) row.move(back, n++);
    *row.length = static_cast<std::int32_t>(n);
    for (; n < row.topk; ++n) row.put(n, -1, kMinusInf);
  }

 private:
  RowRange range_;
  std::int64_t first_ = 0, last_ = 0;
};

// Arrays of the streams that one worker feeds at a time.
struct StreamScratch {
  std::int64_t k;
  float* scores;  // [rows][array_length]
  std::int32_t *ids, *work;

  StreamScratch(Carve& carve, std::int64_t rows, std::int64_t stream_k, std::int64_t work_length)
      : k(stream_k),
        scores(carve.take<float>(rows * TopkStream::array_length(k))),
        ids(carve.take<std::int32_t>(rows * TopkStream::array_length(k))),
        work(carve.take<std::int32_t>(max64(TopkStream::array_length(k), work_length))) {}

  void start(TopkStream& stream, std::int64_t row, bool keep_minus_inf) const {
    const std::int64_t offset = row * TopkStream::array_length(k);
    stream.start(k, keep_minus_inf, scores + offset, ids + offset, work);
  }
};

// The best of each span of each row, where rows are cut into several spans; merged in the order of
// ids. The selection is exact, so any cut gives the same answer.
struct Parts {
  float* scores;          // [rows][spans][padded k]
  std::int32_t* ids;      // [rows][spans][padded k]
  std::int32_t* lengths;  // [rows][spans]
  std::int64_t k, spans;

  // part_k: of a stream's k, as many as a span has keys.
  Parts(Carve& carve, std::int64_t rows, std::int64_t span_count, std::int64_t part_k)
      : k(part_k), spans(span_count) {
    const std::int64_t parts = spans > 1 ? rows * spans : 0;
    scores = carve.take<float>(parts * padded_k(k));
    ids = carve.take<std::int32_t>(parts * padded_k(k));
    lengths = carve.take<std::int32_t>(parts);
  }
  static std::int64_t bytes_of_one(std::int64_t k) { return 8 * padded_k(k) + 4; }

  TopkRow part(std::int64_t row, std::int64_t span) const {
    const std::int64_t i = row * spans + span;
    return {ids + i * padded_k(k), lengths + i, scores + i * padded_k(k), k};
  }
  // What the stream of a span has found; nothing is written behind it.
  void put(std::int64_t row, std::int64_t span, TopkStream& stream) const {
    const TopkRow p = part(row, span);
    const std::int64_t count = stream.finish(k);
    for (std::int64_t i = 0; i < count; ++i) p.put(i, stream.ids()[i], stream.scores()[i]);
    *p.length = static_cast<std::int32_t>(count);
  }
  void merge(std::int64_t row, TopkStream& stream) const {
    for (std::int64_t s = 0; s < spans; ++s) {
      const TopkRow p = part(row, s);
      stream.push_listed(p.scores, p.ids, *p.length);
    }
  }

 private:
  static std::int64_t padded_k(std::int64_t k) { return (k + 31) / 32 * 32; }  // as streams read
};

}  // namespace winnow::cpu::WINNOW_ISA
