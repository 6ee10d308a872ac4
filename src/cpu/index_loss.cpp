// index_loss on CPUs: the kept slots of a row side by side, then row_loss of kl.h.
//
// Per slot: three exponentials or logarithms (about 60 vector operations per 8 slots) and 20 bytes;
// the lists fit caches, so arithmetic bounds it. Sums run in the order of kl.h over the kept slots.
#include "winnow/index_loss.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/kl.h"
#include "cpu/slots.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskRows = 8;

struct Worker {
  float *target, *score;
  std::int32_t *slot, *id;

  Worker(Carve& carve, std::int64_t topk)
      : target(carve.take<float>(topk)),
        score(carve.take<float>(topk)),
        slot(carve.take<std::int32_t>(topk)),
        id(carve.take<std::int32_t>(topk)) {}
};

Refusal refuse(const IndexLossArgs& a) {
  if (a.attention_target.dtype == DType::kF64) return "f64 is left to the reference";
  return {};
}

std::int64_t worker_bytes(const IndexLossArgs& a) {
  Carve carve(nullptr);
  const Worker worker(carve, a.topk_indices.shape[1]);
  return carve.used();
}

std::int64_t workspace_bytes(const IndexLossArgs& a) {
  return worker_bytes(a) * num_threads() + 63;
}

void run(const IndexLossArgs& a, Workspace workspace) {
  constexpr std::int64_t kAnyKey = INT64_MAX;  // the key space is not known here
  const std::int64_t rows = a.topk_indices.shape[0], topk = a.topk_indices.shape[1];
  const std::int64_t own_bytes = worker_bytes(a);
  Carve carve(workspace.data);
  auto* memory = carve.take<unsigned char>(own_bytes * num_threads());

  parallel_for(ceil_div(rows, kTaskRows), [&](std::int64_t task, int worker) {
    Carve own_carve(memory + worker * own_bytes);
    const Worker own(own_carve, topk);
    for (std::int64_t i = task * kTaskRows; i < min64(rows, (task + 1) * kTaskRows); ++i) {
      const RowRange range = row_range(a.starts, a.ends, i, kAnyKey);
      const std::int64_t count = keep_slots(a.topk_indices, i, 0, topk, range, own.slot, own.id);
      const float* target = a.attention_target.as<float>() + i * a.attention_target.strides[0];
      const float* score = a.topk_scores.as<float>() + i * a.topk_scores.strides[0];
      for (std::int64_t s = 0; s < count; ++s) {
        own.target[s] = target[own.slot[s] * a.attention_target.strides[1]];
        own.score[s] = score[own.slot[s] * a.topk_scores.strides[1]];
      }
      a.kl.as<float>()[i * a.kl.strides[0]] =
          row_loss(own.target, own.score, count, static_cast<float>(a.d_kl), own.score);
      float* d_scores = a.d_scores.as<float>() + i * a.d_scores.strides[0];
      const std::int64_t stride = a.d_scores.strides[1];
      for (std::int64_t s = 0; s < topk; ++s) d_scores[s * stride] = 0;
      for (std::int64_t s = 0; s < count; ++s) d_scores[own.slot[s] * stride] = own.score[s];
    }
  });
}

}  // namespace

extern const Implementation<IndexLossArgs> index_loss_implementation;
const Implementation<IndexLossArgs> index_loss_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                                 workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
