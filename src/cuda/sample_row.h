// Where to start in a row of scores: a rank that somewhat more than k of them reach, by a sample.
#pragma once

#include "cuda/select_row.h"

namespace winnow::cuda {

// Where most of the candidates lie: the limit, and a rank near the largest (0: not known).
struct Guess {
  U64 limit, top;
};

// The need-th largest of a jittered, stratified sample of 2048 to 8192 scores in pieces of 64 bytes,
// where need = the expected number of the k best in it + 4.2 sigma. On a plateau it ends in an id: of
// equal scores only those up to it are taken. `lowest`: the rank of the lowest candidates.
template <class E, int T>
__device__ __forceinline__ Guess sample_row(Selection sel, const Row<E>& row, int k, U64 lowest) {
  constexpr int kPerChunk = Row<E>::kPerChunk;
  const int n = static_cast<int>(row.last - row.first), t = threadIdx.x;
  if (n <= sel.capacity) return {lowest, 0};
  SelectShared& s = sel.shared();
  constexpr int kLog = T == 256 ? 6 : T == 512 ? 7 : 8;  // pieces of a round: T / 4 = 2^kLog
  int log_rounds = (n < 48 * k      ? 11
                    : n < 256ll * k ? 12
                                    : 13) -
                   (kLog + 2) - (kPerChunk == 4 ? 2 : 3);
  log_rounds = max(0, log_rounds);
  while ((kPerChunk * T) << log_rounds > 2 * sel.capacity) --log_rounds;
  const int rounds = 1 << log_rounds, sampled = (kPerChunk * T) << log_rounds;
  const U32 pieces = static_cast<U32>(row.end - row.begin) / 4, gap = pieces >> (kLog + log_rounds);
  auto chunk = [&](int round) {
    const U32 u = round * (T / 4) + (t >> 2);
    const U32 piece =
        __umulhi(u << (32 - kLog - log_rounds), pieces) + __umulhi(u * 2654435761u, gap);
    return row.begin + static_cast<int>(piece) * 4 + (t & 3);
  };
  U32* keys = reinterpret_cast<U32*>(sel.held()) + t;  // each thread reads its own: no barrier
  const float least = value_of(key_in(lowest));
  U32 low = kAllLanes, high = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; round += 2) {
    uint4 q[2];
    q[0] = row.chunk(chunk(round));
    if (rounds > 1) q[1] = row.chunk(chunk(round + 1));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && rounds == 1) break;
#pragma unroll
      for (int e = 0; e < kPerChunk; ++e) {
        const U32 bits = bits_at<E>(q[i], e);
        const bool candidate = __uint_as_float(bits) >= least;
        const U32 key = candidate ? key_of(bits) : 0u;
        if (candidate) {
          low = min(low, key);
          high = max(high, key);
        }
        keys[((round + i) * kPerChunk + e) * T] = key;
      }
    }
  }
  block_minmax<T>(sel, 0, low, high);
  if (low > high) return {lowest, 0};
  const U64 top = rank_at(high, kAllLanes);
  const float mean = static_cast<float>(k) * static_cast<float>(sampled) / static_cast<float>(n);
  int need = static_cast<int>(mean + 4.2f * sqrtf(mean) + 2.5f);
  const int fine = max(2, need / 16);
#pragma unroll 1
  for (;;) {
    const int shift = max(0, 21 - __clz(static_cast<int>(high - low)));
#pragma unroll 4
    for (int i = 0; i < kPerChunk * rounds; ++i) {
      const U32 key = keys[i * T];
      count_bin(sel.histogram(), key >= low && key <= high, static_cast<int>((key - low) >> shift));
    }
    __syncthreads();
    find_bin<T>(sel, need);
    if (s.bin < 0) return {lowest, top};
    need -= s.above;
    low += static_cast<U32>(s.bin) << shift;
    high = shift != 0 ? min(high, low + ((1u << shift) - 1)) : low;
    if (s.in_bin <= fine) return {rank_at(low, 0), top};
    if (s.in_bin > sampled / 4 && shift != 0) {  // perhaps a plateau: look at once
      U32 a = kAllLanes, b = 0;
#pragma unroll 4
      for (int i = 0; i < kPerChunk * rounds; ++i) {
        const U32 key = keys[i * T];
        if (key >= low && key <= high) {
          a = min(a, key);
          b = max(b, key);
        }
      }
      block_minmax<T>(sel, 1, a, b);
      low = a;
      high = b;
      if (low == high) break;
    }
    if (shift == 0) break;
  }
  const int shift = max(0, 21 - __clz(static_cast<int>(row.last)));  // a plateau: lowest ids first
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    int equal = 0;
#pragma unroll
    for (int e = 0; e < kPerChunk; ++e) equal += keys[(round * kPerChunk + e) * T] == low ? 1 : 0;
    if (equal != 0)
      atomicAdd(&sel.histogram()[kBins - 1 - (row.column(chunk(round)) >> shift)], equal);
  }
  __syncthreads();
  find_bin<T>(sel, need);
  const U32 past = static_cast<U32>(kBins - s.bin) << shift;
  return {rank_at(low, s.bin < 0 ? 0u : ~past), top};
}

}  // namespace winnow::cuda
