// index_loss on GPUs: a block for each row. It reads the row three times: for the largest score,
// for the sums, and for the loss and its gradient.
//
// Order: a thread adds every kThreads-th slot that counts, in double; then a tree over the lanes of
// a warp and over the warps. Each sum is rounded once, so its error does not grow with the row.
// Floor: 12 bytes read and 4 written per slot. The second and third reading come out of the cache;
// latency of the three barriers bounds short rows.
#include "base/implementation.h"
#include "cuda/attention.h"
#include "cuda/block_sum.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "winnow/index_loss.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = kSumThreads;
constexpr std::int64_t kAnyKey = INT64_MAX;  // the key space is not known here

struct Loss {
  SlotLists slots;
  const float *target, *score;
  std::int64_t target_row, target_slot, score_row, score_slot;
  float d_kl;
  float* kl;
  std::int64_t kl_row;
  float* d_scores;
  std::int64_t d_scores_row, d_scores_slot;
};

__global__ void __launch_bounds__(kThreads) loss_kernel(const Loss loss) {
  const std::int64_t row = blockIdx.x;
  const RowSlots slots = loss.slots[row];
  const float* targets = loss.target + row * loss.target_row;
  const float* scores = loss.score + row * loss.score_row;
  // visit(slot, counts) for this thread's slots
  auto each_slot = [&](auto&& visit) {
    for (std::int64_t s = threadIdx.x; s < loss.slots.topk; s += kThreads) {
      visit(s, s < slots.count && slots[s] >= 0);
    }
  };

  float top = -INFINITY;
  each_slot([&](std::int64_t s, bool counts) {
    if (counts) top = fmaxf(top, scores[s * loss.score_slot]);
  });
  const float maximum = block_maximum(top);
  const float base = maximum == -INFINITY ? 0 : maximum;  // exp gives 0 then, and NaN stays
  double own_sum = 0, own_mass = 0;
  each_slot([&](std::int64_t s, bool counts) {
    if (!counts) return;
    own_sum += expf(scores[s * loss.score_slot] - base);
    own_mass += targets[s * loss.target_slot];
  });
  const double sum = block_sum(own_sum), mass = block_sum(own_mass);
  const bool empty = sum == 0;  // no score above -inf
  const auto log_sum = static_cast<float>(log(sum));
  const auto inverse = static_cast<float>(1 / (mass < 1e-10 ? 1e-10 : mass));
  double own_kl = 0;
  each_slot([&](std::int64_t s, bool counts) {
    float gradient = 0;
    if (counts && !empty) {
      const float t = targets[s * loss.target_slot] * inverse;
      const float log_p = (scores[s * loss.score_slot] - base) - log_sum;
      // 0 ln 0 = 0, also where p is 0
      if (t != 0) own_kl += t * (logf(t < 1e-10f ? 1e-10f : t) - log_p);
      gradient = (expf(log_p) - t) * loss.d_kl;
    }
    loss.d_scores[row * loss.d_scores_row + s * loss.d_scores_slot] = gradient;
  });
  const double kl = block_sum(own_kl);
  if (threadIdx.x == 0) loss.kl[row * loss.kl_row] = static_cast<float>(kl);
}

const Kernel kLoss{loss_kernel};

Refusal refuse(const IndexLossArgs& a) {
  if (a.attention_target.dtype == DType::kF64) return "f64 is left to CPUs";
  return {};
}

std::int64_t workspace_bytes(const IndexLossArgs&) { return 0; }

void run(const IndexLossArgs& a, Workspace workspace) {
  const Loss loss{SlotLists(a.topk_indices, {}, a.starts, a.ends, kAnyKey),
                  a.attention_target.as<float>(),
                  a.topk_scores.as<float>(),
                  a.attention_target.strides[0],
                  a.attention_target.strides[1],
                  a.topk_scores.strides[0],
                  a.topk_scores.strides[1],
                  static_cast<float>(a.d_kl),
                  a.kl.as<float>(),
                  a.kl.strides[0],
                  a.d_scores.as<float>(),
                  a.d_scores.strides[0],
                  a.d_scores.strides[1]};
  kLoss.launch("index_loss",
               {.grid = dim3(static_cast<unsigned>(a.kl.shape[0])),
                .block = dim3(kThreads),
                .stream = stream_of(workspace)},
               loss);
}

}  // namespace

extern const Implementation<IndexLossArgs> index_loss_implementation;
const Implementation<IndexLossArgs> index_loss_implementation = {"cuda.portable", refuse,
                                                                 workspace_bytes, run};

}  // namespace winnow::cuda
