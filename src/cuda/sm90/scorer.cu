// The scorer of compute capability 9.0: 32 or 64 heads of 128 channels, keys in one piece; bf16, and FP8
// and MXFP8, whose codes become bf16 in scratch first, exactly (scorer_codes.h). FP8 also as it is, for who asks
// for it by name (Products::kE4M3): twice the rate, but FP8's tensor cores add with about 14 bits: 3.1e-4
// relative error of a score where bf16 has 2.4e-6.
//
// Tile: a block holds 8 rows (16 of 32 heads) in shared memory and streams tiles of 64 keys past them.
//   Keys are the left operand, 64 rows of a product; queries the right one, so the sum over heads runs
//   over a thread's own sums. The columns are ordered so that each thread's sums belong to one query:
//   8 b + 2 c + e holds query c, head 2 b + e, and lane c of a quad sees 8 b + 2 c + {0, 1}: no shuffles.
// Roles: one warp feeds (TMA); two warpgroups own half of the rows each and both see every tile, so keys
//   are read once per 8 (16) rows. The columns of a warpgroup are two halves with sums of their own: one
//   half multiplies while the other is summed. Weights (64 registers) stay for a whole run of tiles.
// Work: the plan (scorer_plan.h) gives each block an equal, contiguous share of the list (block of rows, tile of keys) of
//   each chunk of keys, so ragged and causal rows balance. A score does not depend on where its tile
//   landed.
// Shared memory: 128 KB of queries, five stages of 16 KB of keys; of codes 64 KB and ten of 8 KB.
// Scratch: the plan; codes as bf16, of 4096 rows and 262144 keys at a time, 136 MB at most.
// Order: channels as the tensor core adds them, 16 at a time; heads 2 b and 2 b + 1 in an FMA chain each
//   over b ascending; their sum; dot_scale; the scales of row and key.
// Floor: 2 * heads * dim FLOPs per score at the rate of wgmma; 8.7 ms for 4096 x 131072 x 64 x 128 at the
//   1.98 GHz that an H200 does not hold under this load (1.5 GHz: 11 ms). Bound by it and by power.
#include "cuda/mma.h"
#include "cuda/sm90/scorer.h"
#include "cuda/sm90/scorer_codes.h"
#include "cuda/sm90/scorer_plan.h"
#include "cuda/sm90/tma.h"
#include "cuda/sm90/wgmma.h"

namespace winnow::cuda::sm90 {
namespace {

constexpr int kWarpgroups = 2, kThreads = 128 * (1 + kWarpgroups);
constexpr int kFeedRegisters = 40, kMathRegisters = 232;

template <class T, int kHeads_>  // T: BF16 or E4M3
struct Shape {
  using Element = T;
  static constexpr int kHeads = kHeads_;
  static constexpr int kSets = 64 / kHeads;  // of 4 queries, in a warpgroup
  static constexpr int kGroupRows = 4 * kSets, kRows = kWarpgroups * kGroupRows;
  static constexpr int kColumns = kGroupRows * kHeads;  // of a warpgroup: 256
  static constexpr int kBlocks = kColumns / 8;          // of 8 columns: 4 queries, 2 heads
  static constexpr int kRowBytes = sizeof(T) * kScorerDim;
  static constexpr int kSlices = kRowBytes / 128;  // of 128 bytes along the channels
  static constexpr int kSlice = 128 / sizeof(T);   // channels of one
  static constexpr int kSteps = kRowBytes / 32;    // products along the channels
  static constexpr int kStages = 10 / sizeof(T);
  static constexpr int kGroupBytes = kColumns * kRowBytes, kQueryBytes = kWarpgroups * kGroupBytes;
  static constexpr int kKeyBytes = kKeys * kRowBytes;
  static constexpr int kBarriersAt = kQueryBytes + kStages * kKeyBytes;
  static constexpr int kBytes = kBarriersAt + 8 * 2 * (kStages + 1);
  static_assert(kBytes <= 232448 && kColumns == 256);
  // setmaxnreg waits forever for registers that the block was not launched with.
  static_assert(kFeedRegisters + kWarpgroups * kMathRegisters <= 65536 / 128);
};

// ---- shared memory --------------------------------------------------------------------------------
struct Ring {  // place and phase in a circular buffer
  int i = 0;
  std::uint32_t phase = 0;
  template <int kSize>
  __device__ void step() {
    if (++i == kSize) {
      i = 0;
      phase ^= 1;
    }
  }
};

template <class S>
struct Memory {  // addresses
  std::uint32_t queries;
  __device__ std::uint32_t keys(int i) const { return queries + S::kQueryBytes + i * S::kKeyBytes; }
  __device__ std::uint32_t barrier(int i) const { return queries + S::kBarriersAt + 8 * i; }
  __device__ std::uint32_t keys_full(int i) const { return barrier(i); }
  __device__ std::uint32_t keys_empty(int i) const { return barrier(S::kStages + i); }
  __device__ std::uint32_t queries_full() const { return barrier(2 * S::kStages); }
  __device__ std::uint32_t queries_empty() const { return barrier(2 * S::kStages + 1); }
};

// What multiplies a finished score, beside dot_scale; null where nothing does.
struct Factors {
  const float* key = nullptr;  // FP8, a scale for each key of the call
  std::int64_t key_stride = 0;
  const std::int32_t* key_exponent = nullptr;  // MXFP8, of the keys in scratch
  const std::int32_t* row_exponent = nullptr;  // of the rows in scratch
};

// Where the maps begin: the row and the key that are their first.
struct Origin {
  std::int64_t row, key;
};

// What a key brings to its scores, as 32 bits; of the nearest key of the call where it is none.
__device__ inline std::uint32_t key_factor(const Factors& factors, const Scorer& s,
                                           const Origin& origin, std::int64_t key) {
  if (key < s.first_key) key = s.first_key;
  if (key >= s.last_key) key = s.last_key - 1;
  if (factors.key != nullptr) return __float_as_uint(__ldg(factors.key + key * factors.key_stride));
  if (factors.key_exponent != nullptr)
    return static_cast<std::uint32_t>(__ldg(factors.key_exponent + key - origin.key));
  return 0;
}

// ---- roles ----------------------------------------------------------------------------------------
template <class S>
__device__ void feed(const Memory<S>& memory, const CUtensorMap* query, const CUtensorMap* key,
                     const Scorer& s, const Plan& plan, const Origin& origin) {
  constexpr int kSetBlocks = S::kBlocks / S::kSets;
  Ring keys, queries;
  Run run;
  for (Walk walk(plan); walk.next(run);) {
    if (threadIdx.x == 0) {
      const std::uint32_t full = memory.queries_full();
      wait(memory.queries_empty(), queries.phase ^ 1);
      expect_bytes(full, S::kQueryBytes);
      for (int b = 0; b < kWarpgroups * S::kBlocks; ++b) {  // 8 columns: 4 queries, 2 heads
        const int group = b / S::kBlocks, block = b % S::kBlocks;
        const std::int64_t row = s.first_row - origin.row +
                                 static_cast<std::int64_t>(run.block) * S::kRows +
                                 group * S::kGroupRows + block / kSetBlocks * 4;
        for (int p = 0; p < S::kSlices; ++p) {
          load_box(memory.queries + group * S::kGroupBytes + (p * S::kBlocks + block) * 1024, query,
                   full, p * S::kSlice, block % kSetBlocks * 2, static_cast<int>(row));
        }
      }
      for (int t = 0; t < run.tiles; ++t) {
        wait(memory.keys_empty(keys.i), keys.phase ^ 1);
        expect_bytes(memory.keys_full(keys.i), S::kKeyBytes);
        for (int p = 0; p < S::kSlices; ++p) {
          load_box(memory.keys(keys.i) + p * kKeys * 128, key, memory.keys_full(keys.i),
                   p * S::kSlice,
                   static_cast<int>(static_cast<std::int64_t>(run.tile + t) * kKeys - origin.key));
        }
        keys.step<S::kStages>();
      }
      queries.step<1>();
    }
    __syncwarp();
  }
}

// Where the sums of a thread go, for one set of queries.
struct Output {
  float* scores;
  std::int64_t start;
  std::uint32_t length;
  std::int32_t exponent;

  __device__ void set(const Scorer& s, std::int64_t row, const Origin& origin,
                      const Factors& factors) {
    start = 0;
    length = 0;
    if (row >= s.last_row) return;
    const Range visible = s.visible(row);
    start = visible.start;
    length = static_cast<std::uint32_t>(visible.length());
    scores = s.scores_of(row);
    exponent = factors.row_exponent != nullptr ? factors.row_exponent[row - origin.row] : 0;
    asm volatile("" : "+l"(scores));  // keep it: ptxas would multiply again for every tile
  }
  __device__ void put(std::int64_t key, float score, std::uint32_t factor,
                      const Factors& factors) const {
    if (static_cast<std::uint64_t>(key - start) >= length) return;
    if (factors.key != nullptr) score *= __uint_as_float(factor);
    if (factors.key_exponent != nullptr) score = ldexpf(score, exponent + static_cast<int>(factor));
    __stcs(scores + key, score);
  }
};

// One product of a tile with half of the columns of a warpgroup.
template <class S>
__device__ void multiply_tile(float (&d)[64], std::uint32_t keys, std::uint32_t queries) {
  const std::uint32_t a = descriptor(keys), b = descriptor(queries);
  pin(d);
  products_begin();
#pragma unroll
  for (int i = 0; i < S::kSteps; ++i) {
    const std::uint32_t slice = i / 4, in = i % 4 * 32;
    multiply<typename S::Element>(d, a + (slice * kKeys * 128 + in) / 16,
                                  b + (slice * S::kColumns * 128 + in) / 16, i > 0);
  }
  products_commit();
}

template <class S>
__device__ void sum(const Memory<S>& memory, const Scorer& s, const Plan& plan,
                    const Origin& origin, const Factors& factors) {
  constexpr int kHalfBlocks = S::kBlocks / 2, kSetBlocks = S::kBlocks / S::kSets;
  const int group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const float floor = s.floor, dot_scale = s.dot_scale;
  float d[2][64], weight[2 * S::kBlocks];
  Output output[S::kSets];
  Ring keys, queries;

  float sums[4];
  // The sums over heads of half h; a set's scores when they are complete.
  std::uint32_t factor[2] = {}, next[2] = {};  // of this thread's keys; asked for a tile ahead
  auto ask = [&](int tile) {
    const std::int64_t key = static_cast<std::int64_t>(tile) * kKeys + 16 * warp + g;
    next[0] = key_factor(factors, s, origin, key);
    next[1] = key_factor(factors, s, origin, key + 8);
    asm volatile("" : "+r"(next[0]), "+r"(next[1]));  // here, not where they are used
  };
  auto finish = [&](int h, int tile) {
    const int set = S::kSets == 2 ? h : 0;
    if (S::kSets == 2 || h == 0) sums[0] = sums[1] = sums[2] = sums[3] = 0;
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 2 r + e
        sums[i] = fmaf(max_nan(d[h][4 * b + i], floor), weight[2 * (h * kHalfBlocks + b) + i % 2],
                       sums[i]);
      }
    }
    if (S::kSets == 1 && h == 0) return;
    float scores[2] = {dot_scale * (sums[0] + sums[1]), dot_scale * (sums[2] + sums[3])};
    pin(scores);  // or the compiler sinks half of the sum into the test for visible keys
    const std::int64_t key = static_cast<std::int64_t>(tile) * kKeys + 16 * warp + g;
    output[set].put(key, scores[0], factor[0], factors);
    output[set].put(key + 8, scores[1], factor[1], factors);
  };

  Run run;
  for (Walk walk(plan); walk.next(run);) {
    const std::int64_t first_row =
        s.first_row + static_cast<std::int64_t>(run.block) * S::kRows + group * S::kGroupRows + c;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      const std::int64_t row = first_row + b / kSetBlocks * 4;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        weight[2 * b + e] = row < s.last_row ? s.weight(row, b % kSetBlocks * 2 + e) : 0;
      }
    }
#pragma unroll
    for (int set = 0; set < S::kSets; ++set)
      output[set].set(s, first_row + 4 * set, origin, factors);

    wait(memory.queries_full(), queries.phase);
    const std::uint32_t low = memory.queries + group * S::kGroupBytes;
    const std::uint32_t high = low + 128 * 128;
    auto release = [&](int stage) {
      __syncwarp();
      if (lane == 0) arrive(memory.keys_empty(stage));
    };
    // One product in flight, across the edge of the loop too. The other warpgroup's runs between a
    // wait and the next issue.
    wait(memory.keys_full(keys.i), keys.phase);
    multiply_tile<S>(d[0], memory.keys(keys.i), low);
    ask(run.tile);
    for (int t = 0; t < run.tiles - 1; ++t) {
      const int stage = keys.i;
      factor[0] = next[0];
      factor[1] = next[1];
      ask(run.tile + t + 1);
      products_wait();
      pin(d[0]);
      multiply_tile<S>(d[1], memory.keys(stage), high);
      finish(0, run.tile + t);
      keys.step<S::kStages>();
      wait(memory.keys_full(keys.i), keys.phase);
      products_wait();
      pin(d[1]);
      multiply_tile<S>(d[0], memory.keys(keys.i), low);
      release(stage);
      finish(1, run.tile + t);
    }
    factor[0] = next[0];
    factor[1] = next[1];
    products_wait();
    pin(d[0]);
    multiply_tile<S>(d[1], memory.keys(keys.i), high);
    finish(0, run.tile + run.tiles - 1);
    products_wait();
    pin(d[1]);
    release(keys.i);
    keys.step<S::kStages>();
    finish(1, run.tile + run.tiles - 1);
    __syncwarp();
    if (lane == 0) arrive(memory.queries_empty());
    queries.step<1>();
  }
}

template <class T, int kHeads>
__global__ void __launch_bounds__(kThreads, 1)
    score_kernel(const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap key,
                 const __grid_constant__ Scorer s, const __grid_constant__ Plan plan,
                 const __grid_constant__ Origin origin, const __grid_constant__ Factors factors) {
  using S = Shape<T, kHeads>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const int base = uniform(static_cast<int>(shared_address(bytes)));
  const Memory<S> memory{static_cast<std::uint32_t>(base)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      barrier_init(memory.keys_full(i), 1);
      barrier_init(memory.keys_empty(i), 4 * kWarpgroups);
    }
    barrier_init(memory.queries_full(), 1);
    barrier_init(memory.queries_empty(), 4 * kWarpgroups);
    barriers_visible();
    prefetch_map(&query);
    prefetch_map(&key);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<kFeedRegisters>();
    if (threadIdx.x < 32) feed<S>(memory, &query, &key, s, plan, origin);
  } else {
    take_registers<kMathRegisters>();
    sum<S>(memory, s, plan, origin, factors);
  }
}

// ---- the host -------------------------------------------------------------------------------------
template <class T, int kHeads>
const Kernel kScore{score_kernel<T, kHeads>, Shape<T, kHeads>::kBytes};
const Kernel kPlan{plan_kernel};
const Kernel kWidenQueries{widen_queries};
const Kernel kWidenKeys{widen_keys};

constexpr std::int64_t kWideRows = 4096, kWideKeys = kChunkTiles * kKeys;

int rows_of_block(int heads) { return heads == 64 ? 8 : 16; }
std::int64_t chunks_of(std::int64_t first_key, std::int64_t last_key) {
  return ceil_div(ceil_div(last_key, kKeys) - first_key / kKeys, kChunkTiles);
}

// What the tensor cores read, in elements.
struct Numbers {
  const void* query;
  std::int64_t query_row, query_head, rows;
  const void* key;
  std::int64_t key_stride, keys;
};

template <class T, int kHeads>
void launch(const char* operation, const Scorer& s, const Numbers& numbers, const Plan& plan,
            const Origin& origin, const Factors& factors, cudaStream_t stream) {
  using S = Shape<T, kHeads>;
  constexpr auto kType =
      sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(T));
  auto size = [](std::int64_t x) { return static_cast<cuuint64_t>(x); };
  const CUtensorMap query =
      tensor_map(operation, {kType,
                             numbers.query,
                             3,
                             {kScorerDim, kHeads, size(numbers.rows)},
                             {size(kBytes * numbers.query_head), size(kBytes * numbers.query_row)},
                             {S::kSlice, 2, 4},
                             true});
  const CUtensorMap key = tensor_map(operation, {kType,
                                                 numbers.key,
                                                 2,
                                                 {kScorerDim, size(numbers.keys), 1},
                                                 {size(kBytes * numbers.key_stride), 0},
                                                 {S::kSlice, kKeys, 1},
                                                 true});
  kScore<T, kHeads>.launch(operation,
                           {.grid = dim3(static_cast<unsigned>(processors())),
                            .block = dim3(kThreads),
                            .shared_bytes = S::kBytes,
                            .stream = stream},
                           query, key, s, plan, origin, factors);
}

template <class T>
void score_numbers(const char* operation, const Scorer& s, const Numbers& numbers,
                   const Origin& origin, const Factors& factors, int2* entries,
                   cudaStream_t stream) {
  const int rows = rows_of_block(s.heads);
  const int blocks = static_cast<int>(ceil_div(s.last_row - s.first_row, rows));
  const int chunks = static_cast<int>(chunks_of(s.first_key, s.last_key));
  kPlan.launch(operation,
               {.grid = dim3(static_cast<unsigned>(chunks)), .block = dim3(1024), .stream = stream},
               s, rows, blocks, entries);
  const Plan plan{entries, chunks, blocks};
  if (s.heads == 64) return launch<T, 64>(operation, s, numbers, plan, origin, factors, stream);
  launch<T, 32>(operation, s, numbers, plan, origin, factors, stream);
}

bool widened(DType dtype, Products products) {
  return dtype == DType::kE4M3 && products == Products::kBF16;
}

// The scratch of a call, from an address at a multiple of 16 bytes.
struct Scratch {
  std::int64_t rows, keys;  // of codes at a time
  unsigned char *queries, *key_numbers, *row_exponent, *key_exponent, *plan, *end;

  Scratch(void* memory, std::int64_t all_rows, std::int64_t all_keys, int heads, bool widened)
      : rows(widened ? min(all_rows, kWideRows) : 0), keys(widened ? min(all_keys, kWideKeys) : 0) {
    queries = static_cast<unsigned char*>(memory);
    key_numbers = queries + 2 * kScorerDim * heads * rows;
    row_exponent = key_numbers + 2 * kScorerDim * keys;
    key_exponent = row_exponent + 16 * ceil_div(4 * rows, 16);
    plan = key_exponent + 16 * ceil_div(4 * keys, 16);
    const bool none = all_rows == 0 || all_keys == 0;
    end = plan +
          (none ? 0 : 8 * (ceil_div(all_rows, rows_of_block(heads)) + 1) * chunks_of(0, all_keys));
  }
};

void score_codes(const char* operation, Scorer s, const Scratch& scratch, cudaStream_t stream) {
  const Scorer all = s;
  auto* row_exponent = reinterpret_cast<std::int32_t*>(scratch.row_exponent);
  auto* key_exponent = reinterpret_cast<std::int32_t*>(scratch.key_exponent);
  const bool mxfp8 = s.query_scale != nullptr;
  Factors factors;
  if (mxfp8) {
    factors.row_exponent = row_exponent;
    factors.key_exponent = key_exponent;
  } else {
    factors.key = static_cast<const float*>(s.key_scale);
    factors.key_stride = s.scale_places.key_stride;
  }
  for (std::int64_t row = all.first_row; row < all.last_row; row += scratch.rows) {
    s.first_row = row;
    s.last_row = min(row + scratch.rows, all.last_row);
    s.scores = all.scores + (row - all.first_row) * all.score_row;
    const std::int64_t rows = s.last_row - row;
    s.first_key = all.first_key;
    kWidenQueries.launch(
        operation,
        {.grid = dim3(static_cast<unsigned>(rows)), .block = dim3(256), .stream = stream}, s,
        reinterpret_cast<uint4*>(scratch.queries), row_exponent);
    for (std::int64_t key = all.first_key; key < all.last_key; key += scratch.keys) {
      s.first_key = key;
      s.last_key = min(key + scratch.keys, all.last_key);
      const std::int64_t keys = s.last_key - key;
      kWidenKeys.launch(operation,
                        {.grid = dim3(static_cast<unsigned>(ceil_div(keys * kChunks, 256))),
                         .block = dim3(256),
                         .stream = stream},
                        s, reinterpret_cast<uint4*>(scratch.key_numbers), key_exponent);
      score_numbers<BF16>(operation, s,
                          {scratch.queries, static_cast<std::int64_t>(s.heads) * kScorerDim,
                           kScorerDim, rows, scratch.key_numbers, kScorerDim, keys},
                          {row, key}, factors, reinterpret_cast<int2*>(scratch.plan), stream);
    }
  }
}

}  // namespace

std::int64_t score_workspace_bytes(std::int64_t rows, std::int64_t keys, int heads, DType dtype,
                                   Products products) {
  const Scratch scratch(nullptr, rows, keys, heads, widened(dtype, products));
  return scratch.end - scratch.queries;
}

void score(const char* operation, const Scorer& s, void* workspace, Products products,
           cudaStream_t stream) {
  if (s.first_row == s.last_row || s.first_key == s.last_key || s.width == 0) return;
  const Scratch scratch(workspace, s.last_row - s.first_row, s.last_key, s.heads,
                        widened(s.dtype, products));
  if (widened(s.dtype, products)) return score_codes(operation, s, scratch, stream);
  auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if (!aligned(s.query) || !aligned(s.key)) return cuda::score(operation, s, stream);
  const Numbers numbers{s.query, s.query_row,         s.query_head, s.rows,
                        s.key,   s.places.key_stride, s.ranges.keys};
  auto* plan = reinterpret_cast<int2*>(scratch.plan);
  if (products == Products::kBF16)
    return score_numbers<BF16>(operation, s, numbers, {0, 0}, {}, plan, stream);
  Factors factors;
  factors.key = static_cast<const float*>(s.key_scale);
  factors.key_stride = s.scale_places.key_stride;
  score_numbers<E4M3>(operation, s, numbers, {0, 0}, factors, plan, stream);
}

}  // namespace winnow::cuda::sm90
