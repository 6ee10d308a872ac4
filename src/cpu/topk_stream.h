// The k best scores of one row, exactly, from a stream of scores with ascending ids.
//
// Rule (select_topk.h): NaN never, -inf if asked for; -0 equals +0; at the cutoff the lowest ids
// win.
//
// Algorithm: a score is appended to a buffer of about 3k candidates when it reaches `least`, the
// first number above the value of the last cut: k earlier, lower ids reach that value already. It
// starts at the lowest finite number, or at -inf, so that the one comparison also drops NaN and
// what is no candidate. When the buffer is full, a cut keeps between k and k + slack of the best,
// in the order of ids. `finish` cuts to exactly k. The buffer never loses the order of ids, so the
// answer needs no sort.
//
// A cut bisects over the bits of the scores, read as ordered integers, from the highest bit in
// which the smallest and the largest differ; the integers at hand are compacted whenever half of
// them have left the range. At most 32 passes for any data, mostly the equivalent of 4 to 6.
//
// The buffer holds the scores themselves: they are the payload, -0 included.
#pragma once

#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr float kMinusInf = -__builtin_inff();
inline constexpr float kNan = __builtin_nanf("");
inline constexpr std::int32_t kLowest = -2147483647 - 1;  // below the ordered key of any number
inline constexpr std::int32_t kMinusInfKey = static_cast<std::int32_t>(0x807fffffu);

// Monotone: a < b as floats exactly if key(a) < key(b); -0 and +0 share the key 0.
WINNOW_INLINE I8 order_key(F8 x) {
  const I8 bits = bits_as_int(x + zero8());  // -0 + 0 = +0
  return bits ^ ((bits >> 31) & splat(0x7fffffff));
}
WINNOW_INLINE float key_value(std::int32_t key) {
  return std::bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}
// The first number above a key's: a float x exceeds key_value(key) exactly if x >= above(key).
// Above +inf stands NaN, which nothing reaches.
WINNOW_INLINE float above(std::int32_t key) { return key_value(key + 1); }

// Stores the lanes that `mask` names side by side, in order. May write 8 lanes whatever the mask.
#if defined(__AVX2__)
struct LaneTable {
  alignas(64) std::uint8_t lanes[256][8];
  constexpr LaneTable() : lanes{} {
    for (int mask = 0; mask < 256; ++mask) {
      for (int lane = 0, n = 0; lane < 8; ++lane) {
        if ((mask >> lane & 1) != 0) lanes[mask][n++] = static_cast<std::uint8_t>(lane);
      }
    }
  }
};
inline constexpr LaneTable kLaneTable{};

class Compress {
 public:
  WINNOW_INLINE explicit Compress(unsigned mask)
      : lanes_(_mm256_cvtepu8_epi32(
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kLaneTable.lanes[mask])))) {}
  WINNOW_INLINE void store_lanes(float* p, F8 v) const {
    store(p, _mm256_permutevar8x32_ps(v, lanes_));
  }
  WINNOW_INLINE void store_lanes(std::int32_t* p, I8 v) const {
    store(p, _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(v), lanes_));
  }

 private:
  __m256i lanes_;
};
#else
class Compress {
 public:
  WINNOW_INLINE explicit Compress(unsigned mask) : mask_(mask) {}
  template <class E, class V>
  WINNOW_INLINE void store_lanes(E* p, V v) const {
    for (unsigned m = mask_; m != 0; m &= m - 1) *p++ = v[__builtin_ctz(m)];
  }

 private:
  unsigned mask_;
};
#endif

WINNOW_INLINE std::int64_t sum_lanes(I8 v) {
  return std::int64_t{v[0] + v[4]} + (v[1] + v[5]) + (v[2] + v[6]) + (v[3] + v[7]);
}

// How many of n keys are >= low. The lanes after the last hold kLowest.
WINNOW_INLINE std::int64_t count_at_least(const std::int32_t* key, std::int64_t n,
                                          std::int32_t low) {
  const I8 limit = splat(low - 1);  // low > kLowest
  I8 c0{}, c1{}, c2{}, c3{};
  std::int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    c0 -= load(key + i) > limit;
    c1 -= load(key + i + 8) > limit;
    c2 -= load(key + i + 16) > limit;
    c3 -= load(key + i + 24) > limit;
  }
  for (; i < n; i += 8) c0 -= load(key + i) > limit;
  return sum_lanes((c0 + c1) + (c2 + c3));
}

// Keeps the keys in [low, high]; returns how many.
WINNOW_INLINE std::int64_t keep_between(std::int32_t* key, std::int64_t n, std::int32_t low,
                                        std::int32_t high) {
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; i += 8) {
    const I8 x = load(key + i);
    unsigned mask = lane_mask((x >= splat(low)) & (x <= splat(high)));
    if (n - i < 8) mask &= (1u << (n - i)) - 1;
    Compress(mask).store_lanes(key + kept, x);
    kept += __builtin_popcount(mask);
  }
  store(key + kept, splat(kLowest));
  return kept;
}

struct Cut {
  std::int32_t key;      // where to cut
  std::int64_t reached;  // how many keys are >= key
};

// A cut that k to k + slack of n > k keys reach; if ties leave none, the k-th largest key. The keys
// are overwritten; 8 more of them must be writable.
inline Cut find_cut(std::int32_t* key, std::int64_t n, std::int64_t k, std::int64_t slack) {
  for (int i = 0; i < 8; ++i) key[n + i] = key[n - 1];
  I8 low8 = load(key), high8 = low8;
  for (std::int64_t i = 8; i < n; i += 8) {
    const I8 x = load(key + i);
    low8 = x < low8 ? x : low8;
    high8 = x > high8 ? x : high8;
  }
  std::int32_t least = low8[0], most = high8[0];
  for (int i = 1; i < 8; ++i) {
    least = low8[i] < least ? low8[i] : least;
    most = high8[i] > most ? high8[i] : most;
  }
  if (least == most) return {least, n};
  store(key + n, splat(kLowest));

  // The answer lies in [low, low + 2^(bit + 1)), as unsigned numbers in the order of the keys.
  constexpr std::uint32_t kFlip = 0x80000000u;
  auto ordered = [](std::uint32_t u) { return static_cast<std::int32_t>(u ^ kFlip); };
  const auto least_bits = static_cast<std::uint32_t>(least);
  int bit = 31 - __builtin_clz(least_bits ^ static_cast<std::uint32_t>(most));
  std::uint32_t low = (least_bits ^ kFlip) & ~((2u << bit) - 1);
  std::int64_t removed = 0;  // keys over the range that are no longer at hand
  std::int64_t over = 0;     // keys over the range among those at hand
  std::int64_t inside = n;   // keys in the range
  for (; bit >= 0; --bit) {
    const std::uint32_t middle = low + (1u << bit);
    const std::int64_t count = count_at_least(key, n, ordered(middle));
    if (removed + count >= k) {
      low = middle;
      inside = count - over;
      if (removed + count <= k + slack) return {ordered(low), removed + count};
    } else {
      inside -= count - over;
      over = count;
    }
    if (n > 64 && 2 * inside <= n) {
      n = keep_between(key, n, ordered(low), ordered(low + ((1u << bit) - 1)));
      removed += over;
      over = 0;
    }
  }
  return {ordered(low), removed + over + inside};
}

class TopkStream {
 public:
  // Candidates held at most, and the length of the arrays that hold them.
  static std::int64_t capacity(std::int64_t k) { return max64(3 * k, k + 512); }
  static std::int64_t array_length(std::int64_t k) {  // a multiple of a vector
    return (capacity(k) + kStep + 15) / 8 * 8;
  }

  // Arrays of array_length(k). `work` holds nothing between calls: streams may share it.
  void start(std::int64_t k, bool keep_minus_inf, float* scores, std::int32_t* ids,
             std::int32_t* work) {
    *this = {};
    k_ = k;
    least_ = keep_minus_inf ? kMinusInf : above(kMinusInfKey);
    score_ = scores;
    id_ = ids;
    work_ = work;
  }
  // Drops scores below `floor`, which should not exceed the k-th best score: the caller checks that
  // k were found.
  void set_floor(float floor) { least_ = floor; }

  // Scores of the keys first_id, first_id + 1, ...
  template <class T>
  WINNOW_INLINE void push(const T* scores, std::int64_t n, std::int64_t first_id) {
    push_with(
        scores,
        n, [&](std::int64_t i) __attribute__((always_inline)) { return ids8(first_id + i); });
  }

  // Candidates of a later part of the row. ids: as long as a multiple of 32 above n.
  void push_listed(const float* scores, const std::int32_t* ids, std::int64_t n) {
    push_with(
        scores, n, [&](std::int64_t i) __attribute__((always_inline)) { return load(ids + i); });
  }

  // Leaves the `count` <= k best, or all if there are fewer; returns how many.
  std::int64_t finish(std::int64_t count) {
    k_ = count;
    if (count == 0) size_ = 0;
    if (size_ > count) cut(0);
    return size_;
  }
  const float* scores() const { return score_; }
  const std::int32_t* ids() const { return id_; }

 private:
  static constexpr std::int64_t kStep = 32;  // scores per test

  template <class T, class Ids>
  WINNOW_INLINE void push_with(const T* scores, std::int64_t n, Ids&& ids) {
    std::int64_t i = 0;
    for (; i + kStep <= n; i += kStep) append(scores + i, i, ids);
    if (i == n) return;
    float rest[kStep];
    for (std::int64_t j = 0; j < kStep; ++j) {
      rest[j] = i + j < n ? to_float(scores[i + j]) : kNan;
    }
    append(rest, i, ids);
  }

  template <class T, class Ids>
  WINNOW_INLINE void append(const T* scores, std::int64_t i, Ids&& ids) {
    F8 v[4];
    I8 reached[4];
    const F8 least = splat(least_);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      v[u] = load(scores + 8 * u);
      reached[u] = v[u] >= least;
    }
    if (lane_mask((reached[0] | reached[1]) | (reached[2] | reached[3])) == 0) return;
    if (size_ + kStep > capacity(k_)) cut((capacity(k_) - k_) / 8);  // what passed before still may
    std::int64_t n = size_;
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const unsigned mask = lane_mask(reached[u]);
      const Compress compress(mask);
      compress.store_lanes(score_ + n, v[u]);
      compress.store_lanes(id_ + n, ids(i + 8 * u));
      n += __builtin_popcount(mask);
    }
    size_ = n;
  }

  // Keeps the k to k + slack best of more than k; with slack 0 exactly k.
  __attribute__((noinline)) void cut(std::int64_t slack) {
    store(score_ + size_, splat(kNan));  // the spare lanes of the last vector
    for (std::int64_t i = 0; i < size_; i += 8) store(work_ + i, order_key(load(score_ + i)));
    const Cut at = find_cut(work_, size_, k_, slack);
    least_ = above(at.key);
    const F8 value = splat(key_value(at.key));
    if (at.reached <= k_ + slack) {
      keep([&](F8 x) __attribute__((always_inline)) { return lane_mask(x >= value); });
    } else {
      keep_with_ties(value);
    }
  }

  // More than k reach the value: those above it stay, and the lowest ids of those that equal it.
  void keep_with_ties(F8 value) {
    I8 over{};
    for (std::int64_t i = 0; i < size_; i += 8) over -= load(score_ + i) > value;
    std::int64_t room = k_ - sum_lanes(over);
    keep([&](F8 x) __attribute__((always_inline)) {
      unsigned equal = lane_mask(x == value);
      const std::int64_t count = __builtin_popcount(equal);
      if (count > room) {
        unsigned first = 0;
        for (; room > 0; --room, equal &= equal - 1) first |= equal & (0u - equal);
        equal = first;
      } else {
        room -= count;
      }
      return lane_mask(x > value) | equal;
    });
  }

  template <class Mask>
  WINNOW_INLINE void keep(Mask&& mask_of) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < size_; i += 8) {
      const F8 x = load(score_ + i);
      const I8 ids = load(id_ + i);
      const unsigned mask = mask_of(x);
      const Compress compress(mask);
      compress.store_lanes(score_ + kept, x);
      compress.store_lanes(id_ + kept, ids);
      kept += __builtin_popcount(mask);
    }
    size_ = kept;
  }

  std::int64_t k_ = 0, size_ = 0;
  float least_ = 0;
  float* score_ = nullptr;
  std::int32_t *id_ = nullptr, *work_ = nullptr;
};

}  // namespace winnow::cpu::WINNOW_ISA
