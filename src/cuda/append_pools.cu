// append_pools on GPUs: a warp for each new token, which pools if the token completes a pool; then
// a block for each request, which keeps the open pool.
//
// Two launches in order, since pools read the rings as they were. Bytes: keys and gates of the new
// tokens and of the open pools, once; in decode (one token for each request) the launches are the
// cost.
#include "base/implementation.h"
#include "cuda/kernel.h"
#include "cuda/pool.h"
#include "cuda/rows.h"
#include "winnow/append_pools.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;  // of a block, a token each

// Rows of rings: [rings, pool_size - 1, dim].
template <class T>
struct Ring {
  T* data;
  std::int64_t ring_stride, slot_stride;

  explicit Ring(const Tensor& t)
      : data(t.as<T>()), ring_stride(t.strides[0]), slot_stride(t.strides[1]) {}
  __device__ T* row(std::int64_t ring, std::int64_t slot) const {
    return data + ring * ring_stride + slot * slot_stride;
  }
};

template <class T>
struct Appending {
  const T *index_key, *gate;
  std::int64_t key_stride, gate_stride;
  Bias ape;
  IntRows cu_seqlens, context, rings, pool_slots;
  std::int64_t tokens, requests, ring_count;
  int dim;
  PoolRounding rounding;
  Ring<T> open_key, open_gate;
  T* pooled_key;
  std::int64_t pooled_pages, pooled_per_page, pooled_page_stride, pooled_stride;

  // The new tokens of a request and the position of the first; none if it is padding.
  struct Request {
    std::int64_t first = 0, last = 0, ring = 0, context = 0;
    __device__ bool holds(std::int64_t token) const { return token >= first && token < last; }
    __device__ std::int64_t position(std::int64_t token) const { return context + token - first; }
  };
  __device__ Request request(std::int64_t r) const {
    Request q;
    q.ring = rings.data == nullptr ? r : rings[r];
    q.context = context[r];
    q.first = cu_seqlens[r];
    q.last = cu_seqlens[r + 1];
    if (q.last > tokens) q.last = tokens;
    if (q.ring < 0 || q.ring >= ring_count || q.context < 0 || q.first < 0) q.last = q.first;
    return q;
  }
  // The last request whose tokens begin at `token` or before; -1 if there is none.
  __device__ std::int64_t request_of(std::int64_t token) const {
    std::int64_t low = -1, high = requests;  // begins <= token < begins
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (cu_seqlens[middle] <= token ? low : high) = middle;
    }
    return low;
  }
  // The row of a pool; null if the slot lies outside.
  __device__ T* destination(std::int64_t slot) const {
    if (slot < 0 || slot >= pooled_pages * pooled_per_page) return nullptr;
    return pooled_key + slot / pooled_per_page * pooled_page_stride +
           slot % pooled_per_page * pooled_stride;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) finish_pools(Appending<T> a) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const std::int64_t r = i < a.tokens ? a.request_of(i) : -1;
  if (r < 0) return;
  const auto request = a.request(r);
  const int pool_size = a.ape.pool_size;
  if (!request.holds(i) || request.position(i) % pool_size != pool_size - 1) return;
  T* pooled = a.destination(a.pool_slots[i]);
  if (pooled == nullptr) return;
  // Token t of the pool is new, unless it came before.
  auto token = [&](int t) { return i - (pool_size - 1 - t); };
  pool_tokens<T>(
      a.ape, a.rounding, a.dim,
      [&](int t) -> const T* {
        return token(t) >= request.first ? a.index_key + token(t) * a.key_stride
                                         : a.open_key.row(request.ring, t);
      },
      [&](int t) -> const T* {
        return token(t) >= request.first ? a.gate + token(t) * a.gate_stride
                                         : a.open_gate.row(request.ring, t);
      },
      pooled);
}

template <class T>
__global__ void __launch_bounds__(kThreads) keep_open(Appending<T> a) {
  const auto request = a.request(blockIdx.x);
  const std::int64_t pool_size = a.ape.pool_size;
  const std::int64_t open = request.position(request.last) % pool_size;  // tokens of the open pool
  const std::int64_t fresh = request.last - open;
  for (std::int64_t i = fresh > request.first ? fresh : request.first; i < request.last; ++i) {
    const std::int64_t slot = request.position(i) % pool_size;
    for (int d = threadIdx.x; d < a.dim; d += kThreads) {
      a.open_key.row(request.ring, slot)[d] = a.index_key[i * a.key_stride + d];
      a.open_gate.row(request.ring, slot)[d] = a.gate[i * a.gate_stride + d];
    }
  }
}

template <class T>
const Kernel kFinish{finish_pools<T>};
template <class T>
const Kernel kKeep{keep_open<T>};

Refusal refuse(const AppendPoolsArgs& a) {
  const Refusal refusal = refuse_pool(a.index_key, a.gate, a.ape, a.pooled_key);
  if (!refusal.empty()) return refusal;
  if (!has_unit_stride(a.open_key) || !has_unit_stride(a.open_gate)) {
    return "open_key and open_gate must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const AppendPoolsArgs&) { return 0; }

template <class T>
void run_typed(const AppendPoolsArgs& a, cudaStream_t stream) {
  const bool paged = a.pooled_key.rank == 3;
  const Appending<T> p{a.index_key.as<T>(),
                       a.gate.as<T>(),
                       a.index_key.strides[0],
                       a.gate.strides[0],
                       Bias(a.ape),
                       IntRows(a.cu_seqlens),
                       IntRows(a.context),
                       a.rings.empty() ? IntRows() : IntRows(a.rings),
                       IntRows(a.pool_slots),
                       a.index_key.shape[0],
                       a.context.shape[0],
                       a.open_key.shape[0],
                       static_cast<int>(a.index_key.shape[1]),
                       a.rounding,
                       Ring<T>(a.open_key),
                       Ring<T>(a.open_gate),
                       a.pooled_key.as<T>(),
                       a.pooled_key.shape[0],
                       paged ? a.pooled_key.shape[1] : 1,
                       a.pooled_key.strides[0],
                       paged ? a.pooled_key.strides[1] : 0};
  Launch launch{.grid = dim3(static_cast<unsigned>(ceil_div(p.tokens, kWarps))),
                .block = dim3(kThreads),
                .stream = stream};
  kFinish<T>.launch("append_pools", launch, p);
  launch.grid = dim3(static_cast<unsigned>(p.requests));
  kKeep<T>.launch("append_pools", launch, p);
}

void run(const AppendPoolsArgs& a, Workspace workspace) {
  with_element(a.index_key.dtype, [&]<class T>(T) { run_typed<T>(a, stream_of(workspace)); });
}

}  // namespace

extern const Implementation<AppendPoolsArgs> append_pools_implementation;
const Implementation<AppendPoolsArgs> append_pools_implementation = {"cuda.portable", refuse,
                                                                     workspace_bytes, run};

}  // namespace winnow::cuda
