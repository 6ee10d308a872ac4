// select_topk on GPUs: a block for each row, the longest first.
//
//   begin    a sample of the row gives a rank that somewhat more than k scores reach (sample_row.h)
//   offer    one pass; what reaches it goes to shared memory as (score, id); kept keys too (select_row.h)
//   finish   the exact k-th rank of the candidates, ids ascending through a bitmap (select_block.h)
//
// Exact on any data: the sample decides the time, never the result. k above 4096, or columns that do not
// lie side by side: select_any.h. No workspace; blocks do not know of each other.
//
// Blocks: 1024 threads where there are fewer rows than processors; else 512, two on a processor of
// compute capability 9.0, or 256, three or four of them, for short rows and 16-bit scores. Shared
// memory: 65 to 99 KB, 6144 (5120, 9216) candidates.
//
// Floor: 4 bytes a score at the bandwidth, 0.50 ms for 4096 x 131072 in f32 on an H200. Bound by it and
// by instructions (11 a score and warp lane) about equally.
#include "winnow/select_topk.h"

#include "base/implementation.h"
#include "base/selection_statistics.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "cuda/select_any.h"

namespace winnow::cuda {
namespace {

constexpr std::int64_t kMostSharedBytes = selection_bytes(9216, kMaxMapWords);

template <class E, int T, int kBlocks>
__global__ void __launch_bounds__(T, kBlocks) select_kernel(SelectCall<E> call) {
  const Selection sel{call.capacity};
  const std::int64_t i = call.rows - 1 - blockIdx.x;  // causal ranges grow with the row
  const Visible visible = call.visible(i);
  const TopkRow out = call.output.row(i, visible.start);
  if (visible.columns == 0) return out.end(0);
  const Row<E> row = call.competing(i, visible.columns);
  prefetch_row(row, row.begin, row.end);
  begin_selection<T>(sel);
  Guess guess = sample_row<E, T>(sel, row, call.k, call.lowest);
  for (;;) {
    offer_row<E, T>(sel, call, row, visible.columns, row.begin, row.end, kFront | kBack,
                    guess.limit);
    if (sel.shared().count >= call.k || guess.limit == call.lowest) break;
    guess = {call.lowest, 0};  // the sample misled
    __syncthreads();
    if (threadIdx.x == 0) sel.shared().count = 0;
    __syncthreads();
  }
  const bool known = guess.limit != call.lowest && guess.top > guess.limit;
  finish_selection<T>(sel, call.k, 0, visible.columns, call.words, out, known ? guess.limit : 1,
                      known ? guess.top : 0);
}

template <class E, int T>
constexpr int kBlocksOf = T == 1024 ? 1 : T == 512 ? 2 : sizeof(E) == 2 ? 3 : 4;
template <class E, int T>
const Kernel kSelect{select_kernel<E, T, kBlocksOf<E, T>>, kMostSharedBytes};
template <class E>
const Kernel kSelectAny{select_any_kernel<E>};

Refusal refuse(const SelectTopkArgs& a) {
  if (a.scores.dtype == DType::kF64) return "f64 is left to CPUs";
  return {};
}

std::int64_t workspace_bytes(const SelectTopkArgs&) { return 0; }

template <class E, int T>
void launch(SelectCall<E> call, cudaStream_t stream) {
  call.capacity = buffer_capacity(call.k, T);
  call.words = map_words(call.width);
  kSelect<E, T>.launch("select_topk",
                       {.grid = dim3(static_cast<unsigned>(call.rows)),
                        .block = dim3(T),
                        .shared_bytes = selection_bytes(call.capacity, call.words),
                        .stream = stream},
                       call);
}

template <class E>
void run_typed(const SelectTopkArgs& a, cudaStream_t stream) {
  const SelectCall<E> call(a);
  const std::int64_t fill = processors();
  if (call.k > kMostFastK || (call.column_stride != 1 && call.width > 1)) {
    kSelectAny<E>.launch("select_topk",
                         {.grid = dim3(static_cast<unsigned>(call.rows)),
                          .block = dim3(kAnyThreads),
                          .shared_bytes = selection_bytes(0, 0),
                          .stream = stream},
                         call);
  } else if (call.rows <= fill && call.width >= 1 << 16) {
    launch<E, 1024>(call, stream);
  } else if (call.k <= 2048 &&
             (sizeof(E) == 2 || (call.rows > 2 * fill && call.width < 1 << 16))) {
    launch<E, 256>(call, stream);
  } else {
    launch<E, 512>(call, stream);
  }
}

void run(const SelectTopkArgs& a, Workspace workspace) {
  with_element(a.scores.dtype, [&]<class E>(E) { run_typed<E>(a, stream_of(workspace)); });
  note_selection({a.scores.shape[0], 1, 0});
}

}  // namespace

extern const Implementation<SelectTopkArgs> select_topk_implementation;
const Implementation<SelectTopkArgs> select_topk_implementation = {"cuda.portable", refuse,
                                                                   workspace_bytes, run};

}  // namespace winnow::cuda
