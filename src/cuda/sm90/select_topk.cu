// select_topk for few long rows on compute capability 9.0: a cluster of blocks for each row.
//
// Each block takes a slice of the row as cuda/select_topk.cu takes a row, all with the same guess, since
// all take the same sample. The leader then pulls the candidates of the others through distributed
// shared memory and finds the k-th rank. A row that the map covers is written by the leader alone; of
// a longer one each block writes its slice, behind the members of the slices before.
//
// Fewer than k candidates in all slices together: all take the row again. A buffer that was full has a
// limit that k candidates of one slice reach, so the k-th of the row does too, and all drop what lies below.
// Distributed shared memory is touched only after a barrier that says that all blocks run.
//
// Clusters of 8 blocks (16 for one or two very long rows), 512 or 1024 threads, one on a processor.
// Shared memory as there. Bound by latency: sample, pass, pull and selection are a chain of about 15 us.
#include <cooperative_groups.h>

#include "base/implementation.h"
#include "base/selection_statistics.h"
#include "cuda/elements.h"
#include "cuda/kernel.h"
#include "cuda/select_call.h"

namespace winnow::cuda::sm90 {
namespace {

namespace cg = cooperative_groups;

constexpr std::int64_t kMostRows = 16, kLeastWidth = 1 << 15, kVeryLong = 1 << 19;

// The value of a number in the memory of a block of the cluster.
template <class T>
__device__ T& in_block(T& own, int block) {
  return *cg::this_cluster().map_shared_rank(&own, block);
}

// Every block tells every other one a number; `told` has a slot for each block.
template <class T>
__device__ void tell_all(T (&told)[kMaxCluster], T number) {
  const cg::cluster_group cluster = cg::this_cluster();
  if (threadIdx.x < cluster.num_blocks())
    in_block(told[cluster.block_rank()], static_cast<int>(threadIdx.x)) = number;
}

// The leader adds the candidates of the others to its own.
template <int T>
__device__ void pull(Selection sel, int k) {
  constexpr int kAhead = 4;
  const cg::cluster_group cluster = cg::this_cluster();
  SelectShared& s = sel.shared();
  int all = 0;
  for (unsigned b = 1; b < cluster.num_blocks(); ++b) all += s.peer_count[b];
#pragma unroll 1
  for (int at = 0; at < all; at += T * kAhead) {
    Candidate c[kAhead];
    const int own = at + static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int x = own + i * T, block = 1;
      c[i] = make_uint2(0, 0);
      if (x >= all) continue;
      for (; x >= s.peer_count[block]; ++block) x -= s.peer_count[block];
      c[i] = cluster.map_shared_rank(sel.held(), block)[x];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (at + i * T < all) offer_lanes<T>(sel, k, own + i * T < all, c[i]);
  }
  while (make_room<T>(sel, k)) {
  }
}

// How many of the candidates held reach `kth` and have their id in [first, last).
template <int T>
__device__ int count_members(Selection sel, U64 kth, U32 first, U32 last) {
  SelectShared& s = sel.shared();
  if (threadIdx.x == 0) s.members = 0;
  __syncthreads();
  int own = 0;
  for (int i = threadIdx.x; i < s.count; i += T) {
    const Candidate c = sel.held()[i];
    const U32 id = c.y & ~kKept;
    own += id >= first && id < last && rank_of(c) >= kth ? 1 : 0;
  }
  own = __reduce_add_sync(kAllLanes, own);
  if (lane_id() == 0) atomicAdd(&s.members, own);
  __syncthreads();
  return s.members;
}

template <class E, int T>
__global__ void __launch_bounds__(T, 1) select_kernel(SelectCall<E> call) {
  const cg::cluster_group cluster = cg::this_cluster();
  const int block = static_cast<int>(cluster.block_rank());
  const int blocks = static_cast<int>(cluster.num_blocks());
  const Selection sel{call.capacity};
  SelectShared& s = sel.shared();
  const std::int64_t i = call.rows - 1 - blockIdx.x / blocks;
  const Visible visible = call.visible(i);
  const TopkRow out = call.output.row(i, visible.start);
  if (visible.columns == 0) {
    if (block == 0) out.end(0);
    return;
  }
  cluster.barrier_arrive();
  const Row<E> row = call.competing(i, visible.columns);
  const int slice = (row.end - row.begin + blocks - 1) / blocks;
  const int begin = min(row.end, row.begin + block * slice), end = min(row.end, begin + slice);
  const int ends = (block == 0 ? kFront : 0) | (block == blocks - 1 ? kBack : 0);
  prefetch_row(row, begin, end);
  begin_selection<T>(sel);
  Guess guess = sample_row<E, T>(sel, row, call.k, call.lowest);
  cluster.barrier_wait();

  for (;;) {
    offer_row<E, T>(sel, call, row, visible.columns, begin, end, ends, guess.limit);
    tell_all(s.peer_count, s.count);
    tell_all(s.peer_limit, s.limit);
    cluster.sync();
    int found = 0;
    for (int b = 0; b < blocks; ++b) found += s.peer_count[b];
    if (found >= call.k || guess.limit == call.lowest) break;
    guess = {call.lowest, 0};  // the sample misled
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    cluster.sync();
  }
  U64 limit = 0;
  for (int b = 0; b < blocks; ++b) limit = s.peer_limit[b] > limit ? s.peer_limit[b] : limit;
  if (limit != 0) {
    cluster.sync();
    drop_below<T>(sel, s.count, limit);
    tell_all(s.peer_count, s.count);
    cluster.sync();
  }
  int members = 0;
  for (int b = 0; b < blocks; ++b) members += s.peer_count[b];
  members = min(members, call.k);

  const bool leader_writes = visible.columns <= 32u * static_cast<U32>(call.words);
  U64 kth = 0;
  if (block == 0) {
    pull<T>(sel, call.k);
    if (leader_writes) cluster.barrier_arrive();  // the others may go
    const bool known = guess.limit != call.lowest && guess.top > guess.limit;
    kth = kth_rank<T>(sel, s.count, call.k, known ? guess.limit : 1, known ? guess.top : 0);
    // What was dropped on the way lies below, in the slices of the others too.
    const U64 dropped = s.limit > limit ? s.limit : limit;
    kth = kth > dropped ? kth : dropped;
    if (!leader_writes) {
      // Not to itself: threads of the leader may still be reading what kth_rank found.
      const int other = static_cast<int>(threadIdx.x) + 1;
      if (other < blocks) in_block(s.kth, other) = kth;
      cluster.sync();
    }
  } else {
    cluster.sync();
    if (leader_writes) return;
    kth = s.kth;
  }

  if (leader_writes) {
    write_members<T>(sel, kth, 0, visible.columns, call.words, out, 0);
    out.end(members);
    cluster.barrier_wait();
    return;
  }
  const U32 first = block == 0 ? 0 : min(row.last, row.column(begin));
  const U32 last = block == blocks - 1 ? visible.columns : min(row.last, row.column(end));
  tell_all(s.peer_members, count_members<T>(sel, kth, first, last));
  cluster.sync();
  int done = 0;
  for (int b = 0; b < block; ++b) done += s.peer_members[b];
  write_members<T>(sel, kth, first, last, call.words, out, done);
  if (block == 0) out.end(members);
}

template <class E, int T>
const Kernel kSelect{select_kernel<E, T>, selection_bytes(9216, kMaxMapWords), true};

Refusal refuse(const SelectTopkArgs& a) {
  if (a.scores.dtype == DType::kF64) return "f64 is left to CPUs";
  const std::int64_t rows = a.scores.shape[0], width = a.scores.shape[1];
  if (rows > kMostRows) return "more than 16 rows fill a GPU without clusters";
  if (width < kLeastWidth) return "rows of fewer than 32768 columns do not need a cluster";
  if (std::min(a.topk_indices.shape[1], width) > kMostFastK) return "topk must be at most 4096";
  if (a.scores.strides[1] != 1) return "columns must have stride 1";
  return {};
}

std::int64_t workspace_bytes(const SelectTopkArgs&) { return 0; }

template <class E, int T>
void launch(SelectCall<E> call, unsigned cluster, cudaStream_t stream) {
  call.capacity = buffer_capacity(call.k, T);
  call.words = map_words(call.width);
  kSelect<E, T>.launch("select_topk",
                       {.grid = dim3(static_cast<unsigned>(call.rows) * cluster),
                        .block = dim3(T),
                        .shared_bytes = selection_bytes(call.capacity, call.words),
                        .cluster = cluster,
                        .stream = stream},
                       call);
}

unsigned cluster_of(const SelectTopkArgs& a) {
  return a.scores.shape[0] <= 2 && a.scores.shape[1] >= kVeryLong ? 16 : 8;
}

void run(const SelectTopkArgs& a, Workspace workspace) {
  const cudaStream_t stream = stream_of(workspace);
  with_element(a.scores.dtype, [&]<class E>(E) {
    const SelectCall<E> call(a);
    if (call.width >= kVeryLong) {
      launch<E, 1024>(call, cluster_of(a), stream);
    } else {
      launch<E, 512>(call, cluster_of(a), stream);
    }
  });
  note_selection({a.scores.shape[0], cluster_of(a), 0});
}

}  // namespace

extern const Implementation<SelectTopkArgs> select_topk_implementation;
const Implementation<SelectTopkArgs> select_topk_implementation = {"cuda.sm90", refuse,
                                                                   workspace_bytes, run};

}  // namespace winnow::cuda::sm90
