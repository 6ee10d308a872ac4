// index_topk on compute capability 9.0: the scorer of scorer.cu, and the selection by clusters where
// there are few long rows. cuda.sm90_fp8 multiplies FP8 as it is; it runs where it is pinned.
#include "base/implementation.h"
#include "base/selection_statistics.h"
#include "cuda/index_topk.h"
#include "cuda/sm90/scorer.h"

namespace winnow::cuda {

extern const Implementation<SelectTopkArgs> select_topk_implementation;

namespace sm90 {

extern const Implementation<SelectTopkArgs> select_topk_implementation;

namespace {

template <Products kProducts>
ScoreChunks chunks_of(const IndexTopkArgs& a) {
  return {a, [&](std::int64_t rows) {
            return score_workspace_bytes(rows, a.index_key.keys(),
                                         static_cast<int>(a.index_query.shape[1]),
                                         a.index_query.dtype, kProducts);
          }};
}

template <Products kProducts>
std::int64_t workspace_bytes(const IndexTopkArgs& a) {
  return chunks_of<kProducts>(a).bytes();
}

template <Products kProducts>
void run(const IndexTopkArgs& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  const ScoreChunks chunks = chunks_of<kProducts>(a);
  const ScoreChunks::Memory memory = chunks.carve(workspace.data);
  index_topk_in_chunks(
      a, chunks, memory, stream,
      [&](const Scorer& s) { score("index_topk", s, memory.scorer, kProducts, stream); },
      [&](const SelectTopkArgs& args) {
        const bool few = select_topk_implementation.refuse(args).empty();
        (few ? select_topk_implementation : cuda::select_topk_implementation).run(args, workspace);
      });
  note_selection({chunks.rows, 1, 0});
}

}  // namespace

extern const Implementation<IndexTopkArgs> index_topk_implementation;
const Implementation<IndexTopkArgs> index_topk_implementation = {
    "cuda.sm90", refuse_scorer<IndexTopkArgs>, workspace_bytes<Products::kBF16>,
    run<Products::kBF16>};
extern const Implementation<IndexTopkArgs> index_topk_fp8_implementation;
const Implementation<IndexTopkArgs> index_topk_fp8_implementation = {
    "cuda.sm90_fp8", refuse_code_scorer<IndexTopkArgs>, workspace_bytes<Products::kE4M3>,
    run<Products::kE4M3>};

}  // namespace sm90
}  // namespace winnow::cuda
