// select_topk on CPUs: rows, or spans of long rows, streamed into a TopkStream.
//
// A stream alone is slow where scores rise along the row: then every score passes the threshold of
// its time. So a long row is sampled first: a floor that about 1.4 k scores are expected to reach
// spares nearly all appending and cutting. If fewer than k reach it, the row is streamed once more,
// a repair, by a sample of other places and at last by none: samples decide the time, never the
// result. Columns that do not lie side by side are copied in blocks, without a sample.
//
// Tasks: rows times spans of at least 256 Ki columns, so that one long row has work for several
// threads; the number of spans depends on the shape only.
//
// Bound by reading: one comparison per score, 32 scores per branch. Measured on one core of a
// shared Zen 3, 131072 -> 2048: 0.04-0.06 ms for Gaussian scores, 0.02-0.03 ms for ascending ones,
// at most 0.076 ms (a plateau of zeros) over ten kinds of data, 0.05 ms with a repair.
#include "winnow/select_topk.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "base/selection_statistics.h"
#include "cpu/selection.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kPieces = 256, kPiece = 16;  // the sample: pieces of consecutive scores
constexpr std::int64_t kSample = kPieces * kPiece;
constexpr std::int64_t kTasks = 16;               // wanted at least
constexpr std::int64_t kLeastSpan = 256ll << 10;  // columns
constexpr std::int32_t kMaxId = 2147483647;

Refusal refuse(const SelectTopkArgs& a) {
  if (a.scores.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.topk_indices) || !has_unit_stride(a.topk_scores)) {
    return "topk_indices and topk_scores must have stride 1 on their last axis";
  }
  return {};
}

struct Plan {
  std::int64_t rows, width, k, spans, span;
  std::int64_t workers;

  explicit Plan(const SelectTopkArgs& a)
      : rows(a.scores.shape[0]),
        width(a.scores.shape[1]),
        k(max64(1, min64(a.topk_indices.shape[1], width))),  // no row has more candidates
        spans(max64(1, min64(kTasks / max64(1, rows), width / kLeastSpan))),
        span(ceil_div(width, spans)),
        workers(min64(rows * spans, num_threads())) {}
};

std::int64_t worker_bytes(const Plan& plan) {
  Carve carve(nullptr);
  StreamScratch(carve, 1, plan.k, kSample + 8);
  return carve.used();
}

std::int64_t workspace_bytes(const SelectTopkArgs& a) {
  const Plan plan(a);
  Carve carve(nullptr);
  Parts(carve, plan.rows, plan.spans, plan.k);
  carve.take<unsigned char>(worker_bytes(plan) * plan.workers);
  return carve.bytes_to_ask();
}

// A floor that about 1.25 k + 16 n / 4096 of the n scores reach, by a sample; -inf if too few of
// the sample are candidates. Work: kSample + 8 numbers.
template <class T>
float sampled_floor(const T* scores, std::int64_t n, std::int64_t k, int attempt,
                    std::int32_t* work) {
  for (std::int64_t p = 0; p < kPieces;
       ++p) {  // the second attempt looks between the first's pieces
    const T* piece = scores + (attempt == 0 ? p * (n - kPiece) / (kPieces - 1)
                                            : (2 * p + 1) * (n - kPiece) / (2 * kPieces));
    for (std::int64_t i = 0; i < kPiece; i += 8) {
      const F8 x = load(piece + i);
      const I8 candidate = x > splat(kMinusInf);
      store(work + p * kPiece + i, (order_key(x) & candidate) | (splat(kLowest) & ~candidate));
    }
  }
  const std::int64_t expected = k * kSample / n;
  const std::int64_t rank = expected + expected / 4 + 16;
  const std::int32_t key = find_cut(work, kSample, rank, rank / 16).key;
  return key <= kMinusInfKey ? kMinusInf : key_value(key);
}

// The k best of n scores that lie `stride` elements apart. Returns how often the sample misled.
template <class T>
std::int64_t select_row(const T* scores, std::int64_t stride, std::int64_t n, std::int64_t first_id,
                        bool keep_minus_inf, TopkStream& stream, const StreamScratch& scratch) {
  const std::int64_t k = scratch.k;
  std::int64_t repairs = 0;
  scratch.start(stream, 0, keep_minus_inf);
  if (stride != 1) {
    float block[512];
    for (std::int64_t at = 0; at < n; at += 512) {
      const std::int64_t count = min64(512, n - at);
      for (std::int64_t i = 0; i < count; ++i) block[i] = to_float(scores[(at + i) * stride]);
      stream.push(block, count, first_id + at);
    }
    return 0;
  }
  if (n >= 4 * k && n >= 4 * kSample) {
    for (int attempt = 0; attempt < 2; ++attempt) {
      const float floor = sampled_floor(scores, n, k, attempt, scratch.work);
      if (floor == kMinusInf) break;
      stream.set_floor(floor);
      stream.push(scores, n, first_id);
      if (stream.finish(k) == k) return repairs;
      ++repairs;
      scratch.start(stream, 0, keep_minus_inf);
    }
  }
  stream.push(scores, n, first_id);
  return repairs;
}

void run(const SelectTopkArgs& a, Workspace workspace) {
  const Plan plan(a);
  const std::int64_t own_bytes = worker_bytes(plan), stride = a.scores.strides[1];
  Carve carve(workspace.data);
  const Parts parts(carve, plan.rows, plan.spans, plan.k);
  auto* scratch_of_workers = carve.take<unsigned char>(own_bytes * plan.workers);
  std::int64_t repairs = 0;
  auto scratch_of = [&](int worker) {
    Carve own(scratch_of_workers + worker * own_bytes);
    return StreamScratch(own, 1, plan.k, kSample + 8);
  };
  auto visible = [&](std::int64_t row) {
    const RowRange range = row_range(a.starts, a.ends, row, kMaxId);
    return RowRange{range.start, min64(range.end, range.start + plan.width)};
  };
  auto write = [&](std::int64_t row, TopkStream& stream) {
    const RowRange range = visible(row);
    const KeptKeys kept(range, a.keep_first, a.keep_last);
    const TopkRow output = row_of(a.topk_indices, a.topk_lengths, a.topk_scores, row);
    with_element(a.scores.dtype, [&]<class T>(const T*) {
      const T* scores = a.scores.as<T>() + row * a.scores.strides[0];
      auto put = [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t key = first; key < last; ++key) {
          kept.put(to_float(scores[(key - range.start) * stride]), key, output);
        }
      };
      put(range.start, kept.rest().start);
      put(kept.rest().end, range.end);
    });
    kept.write(stream, output);
  };

  parallel_for(plan.rows * plan.spans, [&](std::int64_t task, int worker) {
    const std::int64_t row = task / plan.spans, s = task % plan.spans;
    const StreamScratch scratch = scratch_of(worker);
    const RowRange range = visible(row);
    RowRange keys = KeptKeys(range, a.keep_first, a.keep_last).rest();
    if (plan.spans > 1) {
      const std::int64_t first = range.start + s * plan.span;
      keys.start = max64(keys.start, first);
      keys.end = max64(keys.start, min64(keys.end, first + plan.span));
    }
    TopkStream stream;
    std::int64_t repaired = 0;
    with_element(a.scores.dtype, [&]<class T>(const T*) {
      const std::int64_t column = keys.length() > 0 ? keys.start - range.start : 0;
      const T* scores = a.scores.as<T>() + row * a.scores.strides[0] + column * stride;
      repaired =
          select_row(scores, stride, keys.length(), keys.start, a.keep_minus_inf, stream, scratch);
    });
    if (repaired > 0) __atomic_fetch_add(&repairs, repaired, __ATOMIC_RELAXED);
    if (plan.spans > 1) {
      parts.put(row, s, stream);
    } else {
      write(row, stream);
    }
  });
  if (plan.spans > 1) {
    parallel_for(plan.rows, [&](std::int64_t row, int worker) {
      const StreamScratch scratch = scratch_of(worker);
      TopkStream stream;
      scratch.start(stream, 0, a.keep_minus_inf);
      parts.merge(row, stream);
      write(row, stream);
    });
  }
  note_selection({plan.rows, plan.spans, repairs});
}

}  // namespace

extern const Implementation<SelectTopkArgs> select_topk_implementation;
const Implementation<SelectTopkArgs> select_topk_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                   refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
