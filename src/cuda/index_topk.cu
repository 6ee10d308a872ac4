// index_topk on GPUs: the scorer of scorer.cu and the selection of select_topk.cu, a chunk of rows at a
// time (index_topk.h).
#include "base/implementation.h"
#include "base/selection_statistics.h"
#include "cuda/index_topk.h"

namespace winnow::cuda {

extern const Implementation<SelectTopkArgs> select_topk_implementation;

namespace {

constexpr int kThreads = 256;

__global__ void clamp_kernel(IntRows ends, std::int64_t rows, std::int64_t keys,
                             std::int32_t* clamped) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < rows)
    clamped[row] = static_cast<std::int32_t>(min(static_cast<std::int64_t>(ends[row]), keys));
}

const Kernel kClamp{clamp_kernel};

ScoreChunks chunks_of(const IndexTopkArgs& a) {
  return {a, [](std::int64_t) { return std::int64_t{0}; }};
}

Refusal refuse(const IndexTopkArgs& a) { return refuse_scorer(a); }

std::int64_t workspace_bytes(const IndexTopkArgs& a) { return chunks_of(a).bytes(); }

void run(const IndexTopkArgs& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const ScoreChunks chunks = chunks_of(a);
  index_topk_in_chunks(
      a, chunks, chunks.carve(workspace.data), stream,
      [&](const Scorer& s) { score("index_topk", s, stream); },
      [&](const SelectTopkArgs& args) { select_topk_implementation.run(args, workspace); });
  note_selection({chunks.rows, 1, 0});
}

}  // namespace

void clamp_ends(const Tensor& ends, std::int64_t keys, std::int32_t* clamped, cudaStream_t stream) {
  const std::int64_t rows = ends.shape[0];
  kClamp.launch("index_topk",
                {.grid = dim3(static_cast<unsigned>((rows + kThreads - 1) / kThreads)),
                 .block = dim3(kThreads),
                 .stream = stream},
                IntRows(ends), rows, keys, clamped);
}

extern const Implementation<IndexTopkArgs> index_topk_implementation;
const Implementation<IndexTopkArgs> index_topk_implementation = {"cuda.portable", refuse,
                                                                 workspace_bytes, run};

}  // namespace winnow::cuda
