// select_topk on CPUs: one task per row; the row is streamed into a TopkStream.
//
// A stream alone is slow where scores rise along the row: then every score passes the threshold of
// its time. So a long row is sampled first: a floor that about 1.4 k scores are expected to reach
// spares nearly all appending and cutting. If fewer than k were above it, the row is streamed once
// more without it: the sample decides the time, never the result.
//
// Bound by reading: one comparison per score, 32 scores per branch. Measured on one core of a
// shared Zen 3, 131072 -> 2048: 0.04-0.06 ms for Gaussian scores, 0.02-0.03 ms for ascending ones,
// at most 0.076 ms (a plateau of zeros) over ten kinds of data.
#include "winnow/select_topk.h"

#include "base/cpu_features.h"
#include "base/implementation.h"
#include "base/parallel.h"
#include "base/row_range.h"
#include "cpu/topk_stream.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kPieces = 256, kPiece = 16;  // the sample: pieces of consecutive scores
constexpr std::int64_t kSample = kPieces * kPiece;
constexpr std::int32_t kMaxId = 2147483647;

Refusal refuse(const SelectTopkArgs& a) {
  Refusal refusal = refuse_instruction_set(WINNOW_STRING(WINNOW_ISA));
  if (!refusal.empty()) return refusal;
  if (a.scores.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.scores) || !has_unit_stride(a.topk_indices) ||
      !has_unit_stride(a.topk_scores)) {
    return "scores, topk_indices and topk_scores must have stride 1 on their last axis";
  }
  return refusal;
}

// No row has more candidates than `width`.
std::int64_t kept(const SelectTopkArgs& a) {
  return max64(1, min64(a.topk_indices.shape[1], a.scores.shape[1]));
}

// Scratch of one worker.
struct Scratch {
  float* scores;
  std::int32_t *ids, *work;
  Scratch(Carve& carve, std::int64_t k)
      : scores(carve.take<float>(TopkStream::array_length(k))),
        ids(carve.take<std::int32_t>(TopkStream::array_length(k))),
        work(carve.take<std::int32_t>(max64(TopkStream::array_length(k), kSample + 8))) {}
};

std::int64_t worker_bytes(std::int64_t k) {
  Carve carve(nullptr);
  Scratch(carve, k);
  return carve.used();
}

std::int64_t workspace_bytes(const SelectTopkArgs& a) {
  return worker_bytes(kept(a)) * num_threads() + 63;
}

// A floor that about 1.25 k + 16 n / 4096 of the n scores exceed, by a sample; -inf if too few of
// the sample are candidates. Work: kSample + 8 numbers.
template <class T>
float sampled_floor(const T* scores, std::int64_t n, std::int64_t k, std::int32_t* work) {
  for (std::int64_t p = 0; p < kPieces; ++p) {
    const T* piece = scores + p * (n - kPiece) / (kPieces - 1);
    for (std::int64_t i = 0; i < kPiece; i += 8) {
      const F8 x = load(piece + i);
      const I8 candidate = x > splat(kMinusInf);
      store(work + p * kPiece + i, (order_key(x) & candidate) | (splat(kLowest) & ~candidate));
    }
  }
  const std::int64_t expected = k * kSample / n;
  const std::int64_t rank = expected + expected / 4 + 16;
  const std::int32_t key = find_cut(work, kSample, rank, rank / 16).key;
  if (key <= kMinusInfKey) return kMinusInf;
  return key_value(key == 0 ? -2 : key - 1);  // just below; the key -1 would be -0, which equals +0
}

template <class T>
void select_row(const T* scores, std::int64_t n, std::int64_t first_id, TopkStream& stream,
                std::int64_t k, const Scratch& scratch) {
  if (n >= 4 * k && n >= 4 * kSample) {
    stream.start(k, scratch.scores, scratch.ids, scratch.work);
    stream.set_floor(sampled_floor(scores, n, k, scratch.work));
    stream.push(scores, n, first_id);
    if (stream.finish() == k) return;
  }
  stream.start(k, scratch.scores, scratch.ids, scratch.work);
  stream.push(scores, n, first_id);
  stream.finish();
}

void run(const SelectTopkArgs& a, Workspace workspace) {
  const std::int64_t k = kept(a), width = a.scores.shape[1];
  const std::int64_t own_bytes = worker_bytes(k);
  Carve carve(workspace.data);
  auto* scratch_of_workers = carve.take<unsigned char>(own_bytes * num_threads());

  parallel_for(a.scores.shape[0], [&](std::int64_t row, int worker) {
    Carve own(scratch_of_workers + worker * own_bytes);
    const Scratch scratch(own, k);
    const RowRange range = row_range(a.starts, a.ends, row, kMaxId);
    const std::int64_t n = min64(range.length(), width);
    TopkStream stream;
    with_element(a.scores.dtype, [&]<class T>(const T*) {
      const T* scores = a.scores.as<T>() + row * a.scores.strides[0];
      select_row(scores, n, range.start, stream, k, scratch);
    });
    stream.write(row_of(a.topk_indices, a.topk_lengths, a.topk_scores, row));
  });
}

}  // namespace

extern const Implementation<SelectTopkArgs> select_topk_implementation;
const Implementation<SelectTopkArgs> select_topk_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                   refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
