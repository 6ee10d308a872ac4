// dense_index_loss on GPUs: chunks of rows whose scratch fits 1 GiB, windows of 1024 keys that all
// rows of a chunk share. The keys are gone through twice:
//
//   first    targets (attention_target.h) and scores (index_scores_at.h) of the window, and what a
//            row's softmax and mass need of them
//   second   both again (kept where one window holds all keys), kl and the gradient of every score,
//            and from there to the indexer's inputs (index_backward.h)
//
// Order: a row's sums go window by window from key 0 on; within one a thread adds every kThreads-th
// key, in double, then a tree over lanes and warps. Gradients as in index_backward.h, windows
// ascending. Nothing depends on the chunk or on other rows.
// A row without a score above -inf gets an empty range before the second pass: it has no gradient.
// Floor (H200, bf16, 4096 rows over 32768 keys, causal, 64 heads of 576 and of 128): 2 x 5 TFLOP of
// targets, 25 ms. Not timed; expected bound, the targets, which attention_target.cu computes at a
// fraction of that rate.
#include "base/implementation.h"
#include "cuda/attention_target.h"
#include "cuda/block_sum.h"
#include "cuda/index_backward.h"
#include "cuda/index_scores_at.h"
#include "winnow/dense_index_loss.h"

namespace winnow::cuda {
namespace {

constexpr char kName[] = "dense_index_loss";
constexpr std::int64_t kBudget = std::int64_t{1} << 30;  // bytes of a chunk's scratch
constexpr std::int64_t kWindow = 1024, kReducedRows = 64;
constexpr int kThreads = kSumThreads;

using Args = DenseIndexLossArgs;

// What a row's loss needs of the whole row.
struct RowState {
  double sum, mass, kl;
  float maximum;
};

struct Loss {
  RowRanges ranges;  // of the call
  std::int64_t first, window, columns;
  const float* target;          // [rows][columns]
  float* scores;                // [rows][columns]; gradients at last
  RowState* states;             // [rows]
  std::int32_t *starts, *ends;  // of the call's rows: empty where a row has no score above -inf
  float d_kl;
  float* kl;
  std::int64_t kl_row;
};

// visit(column) for this thread's visible keys of the window.
template <class Visit>
__device__ void each_column(const Loss& loss, const Range& range, Visit&& visit) {
  const std::int64_t begin = max(range.start - loss.window, std::int64_t{0});
  const std::int64_t end = min(range.end - loss.window, loss.columns);
  for (std::int64_t c = threadIdx.x; c < end; c += kThreads) {
    if (c >= begin) visit(c);
  }
}

__global__ void __launch_bounds__(kThreads) sum_kernel(const Loss loss) {
  const std::int64_t local = blockIdx.x;
  const Range range = loss.ranges[loss.first + local];
  const float* scores = loss.scores + local * loss.columns;
  const float* target = loss.target + local * loss.columns;
  RowState state{0, 0, 0, -INFINITY};
  if (loss.window > 0) state = loss.states[local];
  float top = -INFINITY;
  each_column(loss, range, [&](std::int64_t c) { top = fmaxf(top, scores[c]); });
  const float maximum = fmaxf(state.maximum, block_maximum(top));
  const float base = maximum == -INFINITY ? 0 : maximum;  // exp gives 0 then, and NaN stays
  double sum = 0, mass = 0;
  each_column(loss, range, [&](std::int64_t c) {
    sum += expf(scores[c] - base);
    mass += target[c];
  });
  sum = block_sum(sum);
  mass = block_sum(mass);
  if (threadIdx.x > 0) return;
  if (state.sum != 0 && maximum > state.maximum) {
    state.sum *= exp(static_cast<double>(state.maximum) - static_cast<double>(maximum));
  }
  loss.states[local] = {state.sum + sum, state.mass + mass, 0, maximum};
}

__global__ void __launch_bounds__(kThreads) close_kernel(const Loss loss, std::int64_t rows) {
  const std::int64_t local = block_index() * kThreads + threadIdx.x;
  if (local >= rows) return;
  const std::int64_t row = loss.first + local;
  const Range range = loss.ranges[row];
  const bool empty = loss.states[local].sum == 0;
  loss.starts[row] = static_cast<std::int32_t>(range.start);
  loss.ends[row] = static_cast<std::int32_t>(empty ? range.start : range.end);
}

__global__ void __launch_bounds__(kThreads) loss_kernel(const Loss loss, bool last) {
  const std::int64_t local = blockIdx.x, row = loss.first + local;
  const std::int64_t start = loss.starts[row], end = loss.ends[row];
  float* scores = loss.scores + local * loss.columns;
  const float* target = loss.target + local * loss.columns;
  const RowState state = loss.states[local];
  const float base = state.maximum == -INFINITY ? 0 : state.maximum;
  const auto log_sum = static_cast<float>(log(state.sum));
  const auto inverse = static_cast<float>(1 / (state.mass < 1e-10 ? 1e-10 : state.mass));
  double kl = 0;
  each_column(loss, {start, end}, [&](std::int64_t c) {
    const float t = target[c] * inverse, log_p = (scores[c] - base) - log_sum;
    // 0 ln 0 = 0, also where p is 0
    if (t != 0) kl += t * (logf(t < 1e-10f ? 1e-10f : t) - log_p);
    scores[c] = (expf(log_p) - t) * loss.d_kl;
  });
  kl = block_sum(kl);
  if (threadIdx.x > 0) return;
  kl += state.kl;
  loss.states[local].kl = kl;
  if (last) loss.kl[row * loss.kl_row] = static_cast<float>(kl);
}

const Kernel kSum{sum_kernel};
const Kernel kClose{close_kernel};
const Kernel kLoss{loss_kernel};

// Rows of a chunk and keys of a window follow from the shapes alone.
struct Plan {
  std::int64_t rows, keys, columns, chunk, windows;
  explicit Plan(const Args& a) : rows(a.index_query.shape[0]), keys(a.index_key.shape[0]) {
    columns = keys < 1 ? 1 : keys < kWindow ? keys : kWindow;
    windows = keys <= columns ? 1 : (keys + columns - 1) / columns;
    const std::int64_t of_row = index_scratch_bytes(a.index_query, columns) + columns * 8 +
                                static_cast<std::int64_t>(sizeof(RowState));
    const std::int64_t fit = kBudget / of_row;
    chunk = rows < fit ? rows : fit > 1 ? fit : rows > 1 ? 1 : rows;
  }
};

template <class T>
struct Scratch {
  float *target, *scores;
  RowState* states;
  std::int32_t *starts, *ends;
  IndexScratch<T> index;

  Scratch(Carve& carve, const Args& a, const Plan& plan)
      : target(carve.take<float>(plan.chunk * plan.columns)),
        scores(carve.take<float>(plan.chunk * plan.columns)),
        states(carve.take<RowState>(plan.chunk)),
        starts(carve.take<std::int32_t>(plan.rows)),
        ends(carve.take<std::int32_t>(plan.rows)),
        index(carve, a.index_query, plan.chunk, plan.columns, plan.keys) {}
};

Refusal refuse(const Args& a) {
  if (a.index_query.dtype == DType::kF64) return "f64 is left to CPUs";
  if (a.index_query.shape[1] > 128) return "takes 1 to 128 index heads";
  if (a.index_query.shape[2] > 256) return "takes 1 to 256 channels of the indexer";
  for (const Tensor* t :
       {&a.index_query, &a.index_key, &a.query, &a.key, &a.d_index_query, &a.d_index_key}) {
    if (!has_unit_stride(*t)) return "channels must have stride 1";
  }
  return {};
}

std::int64_t workspace_bytes(const Args& a) {
  Carve carve(nullptr);
  with_element(a.index_query.dtype, [&]<class T>(T) { Scratch<T>(carve, a, Plan(a)); });
  return carve.bytes_to_ask();
}

template <class T>
void run_typed(const Args& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const Plan plan(a);
  Carve carve(workspace.data);
  Scratch<T> scratch(carve, a, plan);
  AttentionTarget<T> target(a.query, a.key, a.lse, a.softmax_scale);
  ScoresAt scores(a.index_query, a.index_key, a.index_weights, a.relu);
  IndexWeights<T> weights(a, scratch.index);
  Loss loss{};
  loss.ranges = RowRanges(a.starts, a.ends, plan.keys);
  loss.target = target.target = scratch.target;
  loss.scores = scores.scores = scratch.scores;
  loss.states = scratch.states;
  loss.starts = scratch.starts;
  loss.ends = scratch.ends;
  loss.d_kl = static_cast<float>(a.d_kl);
  loss.kl = a.kl.as<float>();
  loss.kl_row = a.kl.strides[0];
  weights.d_scores = scratch.scores;
  target.target_slot = scores.score_slot = weights.d_scores_slot = 1;
  SlotLists visible;
  visible.ranges = loss.ranges;
  std::int64_t rows = 0;  // of the chunk

  auto choose = [&](std::int64_t window) {
    loss.window = visible.window = window;
    const std::int64_t left = plan.keys - window;
    loss.columns = left < 1 ? 1 : left < plan.columns ? left : plan.columns;
    visible.topk = loss.columns;
    target.target_row = scores.score_row = weights.d_scores_row = loss.columns;
  };
  auto compute = [&] {
    target.slots = scores.slots = visible;
    target.first = scores.first = loss.first;
    target.rows = scores.rows = rows;
    run_attention_target(kName, target, stream);
    for (std::int64_t r = 0; a.reduce_target && r < rows; r += kReducedRows) {
      const std::int64_t count = rows - r < kReducedRows ? rows - r : kReducedRows;
      a.reduce_target(make_tensor(scratch.target + r * loss.columns, DType::kF32,
                                  {count, loss.columns}, a.kl.device));
    }
    run_scores_at(kName, scores, stream);
  };
  KeyOrder::clear(kName, plan.keys, weights.sums, stream);
  for (loss.first = 0; loss.first < plan.rows; loss.first += plan.chunk) {
    rows = plan.rows - loss.first < plan.chunk ? plan.rows - loss.first : plan.chunk;
    const Launch of_rows{
        .grid = dim3(static_cast<unsigned>(rows)), .block = dim3(kThreads), .stream = stream};
    for (std::int64_t w = 0; w < plan.windows; ++w) {
      choose(w * plan.columns);
      compute();
      kSum.launch(kName, of_rows, loss);
    }
    kClose.launch(kName,
                  {.grid = grid_of((rows + kThreads - 1) / kThreads),
                   .block = dim3(kThreads),
                   .stream = stream},
                  loss, rows);
    for (std::int64_t w = 0; w < plan.windows; ++w) {
      choose(w * plan.columns);
      if (plan.windows > 1) compute();
      kLoss.launch(kName, of_rows, loss, w == plan.windows - 1);
      BackwardChunk<T>& b = weights.b;
      b.slots = visible;
      b.slots.ranges.starts.data = scratch.starts;
      b.slots.ranges.ends.data = scratch.ends;
      b.slots.ranges.starts.stride = b.slots.ranges.ends.stride = 1;
      b.first = loss.first;
      b.rows = rows;
      b.adds = w > 0;
      run_index_backward(kName, weights, scratch.index.order, stream);
    }
  }
}

void run(const Args& a, Workspace workspace) {
  with_element(a.index_query.dtype, [&]<class T>(T) { run_typed<T>(a, workspace); });
}

}  // namespace

extern const Implementation<Args> dense_index_loss_implementation;
const Implementation<Args> dense_index_loss_implementation = {"cuda.portable", refuse,
                                                              workspace_bytes, run};

}  // namespace winnow::cuda
