// append_pools on CPUs: all pools that the new tokens complete, then the rings.
//
// Tasks: 64 new tokens, each by its request, which a search in cu_seqlens finds; after all of them
// one task per 64 requests, since pools read the rings as they were. Bytes: keys and gates of the
// new tokens and of the open pools, once; a pool's arithmetic is that of pool.h.
#include "winnow/append_pools.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/pool.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTask = 64;  // tokens, or requests

Refusal refuse(const AppendPoolsArgs& a) {
  Refusal refusal = refuse_pool(a.index_key, a.gate, a.ape, a.pooled_key);
  if (refusal.empty() && !(has_unit_stride(a.open_key) && has_unit_stride(a.open_gate))) {
    refusal = "open_key and open_gate must have stride 1 on their last axis";
  }
  return refusal;
}

std::int64_t workspace_bytes(const AppendPoolsArgs&) { return 0; }

WINNOW_INLINE std::int64_t number(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}

// The new tokens of a request and the position of the first; none if it is padding.
struct Request {
  std::int64_t first = 0, last = 0, ring = 0, context = 0;

  Request() = default;
  Request(const AppendPoolsArgs& a, std::int64_t r) {
    ring = a.rings.empty() ? r : number(a.rings, r);
    context = number(a.context, r);
    first = number(a.cu_seqlens, r);
    last = min64(number(a.cu_seqlens, r + 1), a.index_key.shape[0]);
    if (ring < 0 || ring >= a.open_key.shape[0] || context < 0 || first < 0) last = first;
  }
  bool holds(std::int64_t token) const { return token >= first && token < last; }
  std::int64_t position(std::int64_t token) const { return context + token - first; }
};

// The last request whose tokens begin at `token` or before; -1 if there is none.
std::int64_t request_of(const AppendPoolsArgs& a, std::int64_t token) {
  std::int64_t low = -1, high = a.context.shape[0];  // begins <= token < begins
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (number(a.cu_seqlens, middle) <= token ? low : high) = middle;
  }
  return low;
}

// Row `slot` of a ring.
template <class T>
WINNOW_INLINE T* ring_row(const Tensor& open, std::int64_t ring, std::int64_t slot) {
  return open.as<T>() + ring * open.strides[0] + slot * open.strides[1];
}

// The row of a pool in pooled_key; null if the slot lies outside.
template <class T>
T* destination(const Tensor& pooled_key, std::int64_t slot) {
  const bool paged = pooled_key.rank == 3;
  const std::int64_t per_page = paged ? pooled_key.shape[1] : 1;
  if (slot < 0 || slot >= pooled_key.shape[0] * per_page) return nullptr;
  return pooled_key.as<T>() + slot / per_page * pooled_key.strides[0] +
         (paged ? slot % per_page * pooled_key.strides[1] : 0);
}

// The pool whose last token is new token i of `request`.
template <class T>
void finish(const AppendPoolsArgs& a, const Request& request, std::int64_t i) {
  T* pooled = destination<T>(a.pooled_key, number(a.pool_slots, i));
  if (pooled == nullptr) return;
  const std::int64_t pool_size = a.ape.shape[0];
  PoolTokens<T> tokens;
  for (std::int64_t t = 0; t < pool_size; ++t) {
    const std::int64_t j = i - (pool_size - 1 - t);  // a new token, unless it came before
    const bool fresh = j >= request.first;
    tokens.key[t] = fresh ? a.index_key.as<T>() + j * a.index_key.strides[0]
                          : ring_row<T>(a.open_key, request.ring, t);
    tokens.gate[t] =
        fresh ? a.gate.as<T>() + j * a.gate.strides[0] : ring_row<T>(a.open_gate, request.ring, t);
  }
  pool_tokens(tokens, a.ape, a.rounding, a.index_key.shape[1], pooled);
}

// Keeps the new tokens of the open pool.
template <class T>
void keep_open(const AppendPoolsArgs& a, const Request& request) {
  const std::int64_t pool_size = a.ape.shape[0];
  const auto bytes = static_cast<std::size_t>(a.index_key.shape[1]) * sizeof(T);
  const std::int64_t open = request.position(request.last) % pool_size;  // tokens of the open pool
  for (std::int64_t i = max64(request.first, request.last - open); i < request.last; ++i) {
    const std::int64_t slot = request.position(i) % pool_size;
    __builtin_memcpy(ring_row<T>(a.open_key, request.ring, slot),
                     a.index_key.as<T>() + i * a.index_key.strides[0], bytes);
    __builtin_memcpy(ring_row<T>(a.open_gate, request.ring, slot),
                     a.gate.as<T>() + i * a.gate.strides[0], bytes);
  }
}

void run(const AppendPoolsArgs& a, Workspace) {
  const std::int64_t tokens = a.index_key.shape[0], requests = a.context.shape[0],
                     pool_size = a.ape.shape[0];
  parallel_for(ceil_div(tokens, kTask), [&](std::int64_t task, int) {
    const std::int64_t begin = task * kTask, end = min64(tokens, begin + kTask);
    with_element(a.index_key.dtype, [&]<class T>(const T*) {
      Request request;
      for (std::int64_t i = begin; i < end; ++i) {
        if (!request.holds(i)) {
          const std::int64_t r = request_of(a, i);
          request = r < 0 ? Request() : Request(a, r);
        }
        if (request.holds(i) && request.position(i) % pool_size == pool_size - 1)
          finish<T>(a, request, i);
      }
    });
  });
  parallel_for(ceil_div(requests, kTask), [&](std::int64_t task, int) {
    with_element(a.index_key.dtype, [&]<class T>(const T*) {
      for (std::int64_t r = task * kTask; r < min64(requests, (task + 1) * kTask); ++r)
        keep_open<T>(a, Request(a, r));
    });
  });
}

}  // namespace

extern const Implementation<AppendPoolsArgs> append_pools_implementation;
const Implementation<AppendPoolsArgs> append_pools_implementation = {WINNOW_IMPLEMENTATION_NAME,
                                                                     refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
