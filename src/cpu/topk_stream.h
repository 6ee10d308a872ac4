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

// The same for two vectors. May write 16 lanes whatever the masks.
class CompressPair {
 public:
#if defined(__AVX512F__)
  WINNOW_INLINE CompressPair(unsigned low, unsigned high)
      : CompressPair(static_cast<__mmask16>(low | high << 8)) {}
  WINNOW_INLINE explicit CompressPair(__mmask16 mask) : mask_(mask) {}
  WINNOW_INLINE void store_lanes(float* p, Wide v) const {
    store(p, Wide{_mm512_maskz_compress_ps(mask_, v.lanes)});
  }
  WINNOW_INLINE void store_lanes(std::int32_t* p, __m512i v) const {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(mask_, v));
  }
  WINNOW_INLINE void store_lanes(float* p, F8 low, F8 high) const {
    store_lanes(p, join(low, high));
  }
  WINNOW_INLINE void store_lanes(std::int32_t* p, I8 low, I8 high) const {
    store_lanes(p, _mm512_inserti32x8(_mm512_castsi256_si512(reinterpret_cast<__m256i>(low)),
                                      reinterpret_cast<__m256i>(high), 1));
  }
  WINNOW_INLINE std::int64_t count() const { return __builtin_popcount(mask_); }

 private:
  __mmask16 mask_;
#else
  WINNOW_INLINE CompressPair(unsigned low, unsigned high)
      : low_(low),
        high_(high),
        low_count_(__builtin_popcount(low)),
        count_(low_count_ + __builtin_popcount(high)) {}
  template <class E, class V>
  WINNOW_INLINE void store_lanes(E* p, V low, V high) const {
    low_.store_lanes(p, low);
    high_.store_lanes(p + low_count_, high);
  }
  WINNOW_INLINE std::int64_t count() const { return count_; }

 private:
  Compress low_, high_;
  std::int64_t low_count_, count_;
#endif
};

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
  const I8 least = splat(low), most = splat(high);
  auto between = [&](I8 x) { return lane_mask((x >= least) & (x <= most)); };
  std::int64_t kept = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const I8 a = load(key + i), b = load(key + i + 8);
    const CompressPair compress(between(a), between(b));
    compress.store_lanes(key + kept, a, b);
    kept += compress.count();
  }
  for (; i < n; i += 8) {
    const I8 x = load(key + i);
    unsigned mask = between(x);
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

// The ids of scores that follow each other: first, first + 1, ..., or those of a list.
struct IdsFrom {
  std::int64_t first;
  WINNOW_INLINE I8 operator[](std::int64_t i) const { return ids8(first + i); }
#if defined(__AVX512F__)
  WINNOW_INLINE __m512i sixteen(std::int64_t i) const {
    return _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(first + i))),
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
  }
#endif
};
struct IdsListed {
  const std::int32_t* ids;
  WINNOW_INLINE I8 operator[](std::int64_t i) const { return load(ids + i); }
#if defined(__AVX512F__)
  WINNOW_INLINE __m512i sixteen(std::int64_t i) const { return _mm512_loadu_si512(ids + i); }
#endif
};

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

  // Drops scores below that of `key`, which k other scores of the row reach.
  void raise(std::int32_t key) {
    const float floor = key_value(key);
    if (floor > least_) least_ = floor;  // not where there is none: kLowest is the key of a NaN
  }
  // A key that k of the scores so far reach; kLowest if none is known.
  std::int32_t reached_key() const { return reached_; }

  // Scores of the keys first_id, first_id + 1, ...
  template <class T>
  WINNOW_INLINE void push(const T* scores, std::int64_t n, std::int64_t first_id) {
    push_with(scores, n, IdsFrom{first_id});
  }

  // Candidates of a later part of the row. ids: as long as a multiple of 32 above n.
  void push_listed(const float* scores, const std::int32_t* ids, std::int64_t n) {
    push_with(scores, n, IdsListed{ids});
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
  WINNOW_INLINE void push_with(const T* scores, std::int64_t n, Ids ids) {
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
  WINNOW_INLINE void append(const T* scores, std::int64_t i, Ids ids) {
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(least_);
    const Wide low = load_sixteen(scores), high = load_sixteen(scores + 16);
    const __mmask16 low_reached = _mm512_cmp_ps_mask(low.lanes, least, _CMP_GE_OQ);
    const __mmask16 high_reached = _mm512_cmp_ps_mask(high.lanes, least, _CMP_GE_OQ);
    if ((low_reached | high_reached) == 0) return;
    make_room();
    const std::int64_t n = put(size_, CompressPair(low_reached), low, ids.sixteen(i));
    size_ = put(n, CompressPair(high_reached), high, ids.sixteen(i + 16));
#else
    F8 v[4];
    I8 reached[4];
    const F8 least = splat(least_);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      v[u] = load(scores + 8 * u);
      reached[u] = v[u] >= least;
    }
    if (lane_mask((reached[0] | reached[1]) | (reached[2] | reached[3])) == 0) return;
    make_room();
    std::int64_t n = size_;
#pragma GCC unroll 2
    for (int u = 0; u < 4; u += 2) {
      n = put(n, CompressPair(lane_mask(reached[u]), lane_mask(reached[u + 1])), v[u], v[u + 1],
              ids[i + 8 * u], ids[i + 8 * u + 8]);
    }
    size_ = n;
#endif
  }
  WINNOW_INLINE void make_room() {  // what passed the threshold before still may
    if (size_ + kStep > capacity(k_)) cut((capacity(k_) - k_) / 8);
  }

  // Puts candidates behind the first n; returns how many there are then.
  WINNOW_INLINE std::int64_t put(std::int64_t n, const CompressPair& compress, F8 low, F8 high,
                                 I8 low_ids, I8 high_ids) {
    compress.store_lanes(score_ + n, low, high);
    compress.store_lanes(id_ + n, low_ids, high_ids);
    return n + compress.count();
  }
#if defined(__AVX512F__)
  WINNOW_INLINE std::int64_t put(std::int64_t n, const CompressPair& compress, Wide scores,
                                 __m512i ids) {
    compress.store_lanes(score_ + n, scores);
    compress.store_lanes(id_ + n, ids);
    return n + compress.count();
  }
  template <class T>
  static WINNOW_INLINE Wide load_sixteen(const T* p) {
    if constexpr (sizeof(T) == 4) return load16(p);
    return join(load(p), load(p + 8));
  }
#endif

  // Keeps the k to k + slack best of more than k; with slack 0 exactly k.
  __attribute__((noinline)) void cut(std::int64_t slack) {
    store(score_ + size_, splat(kNan));  // the spare lanes of the last two vectors
    store(score_ + size_ + 8, splat(kNan));
    for (std::int64_t i = 0; i < size_; i += 8) store(work_ + i, order_key(load(score_ + i)));
    const Cut at = find_cut(work_, size_, k_, slack);
    least_ = above(at.key);
    reached_ = at.key;
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
    for (std::int64_t i = 0; i < size_; i += 16) {
      const F8 low = load(score_ + i), high = load(score_ + i + 8);
      const I8 low_ids = load(id_ + i), high_ids = load(id_ + i + 8);
      const unsigned low_mask = mask_of(low);  // in this order: ties are counted
      kept = put(kept, CompressPair(low_mask, mask_of(high)), low, high, low_ids, high_ids);
    }
    size_ = kept;
  }

  std::int64_t k_ = 0, size_ = 0;
  float least_ = 0;
  std::int32_t reached_ = kLowest;
  float* score_ = nullptr;
  std::int32_t *id_ = nullptr, *work_ = nullptr;
};

}  // namespace winnow::cpu::WINNOW_ISA
