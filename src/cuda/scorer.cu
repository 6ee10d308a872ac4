// The scorer on tensor cores: bf16, f16, FP8 and MXFP8, keys in one piece or in pages.
//
// Tile: a block of 8 warps holds the queries of 2 to 32 rows in registers, as right operands
// (columns
//   are heads), and streams tiles of 64 keys (32 where channels exceed 128) past them as left
//   operands. A warp has 8 (4) column tiles of 8 heads: 1 to 4 rows, or a part of a row that has
//   more heads. Where few rows share keys, warps split the tile of keys among them instead.
// Numbers: E4M3 becomes bf16 on the way from the raw tile to the tile, exactly. In MXFP8 the powers
// of
//   two of a row and of a key are taken relative to the largest of the row and of the key, which
//   multiply the finished score: exact while scales of one key, and of one row, lie within 2^124 of
//   each other.
// Shared memory: three tiles of 16 KB (E4M3: three raw ones of 8 KB and two converted), sums of
// heads
//   for two tiles of up to 32 rows (16 KB), weights come from memory once: 66 or 74 KB.
// Order: the channels of a dot in groups of 16, as the tensor core adds them: thread c of a quad
// takes
//   channels 8 c to 8 c + 7 of each 32. Heads: lane c sums heads 8 b + 2 c and 8 b + 2 c + 1, each
//   in one FMA chain over b ascending; then both, then lanes c and c ^ 1, then c ^ 2; then parts of
//   a row ascending; then dot_scale, and the key's scale. Nothing else enters.
// Floor: 2 * heads * dim FLOPs per score at the rate of mma.sync, or 4 bytes written per score.
// Bound by
//   the first, and by 2 FP32 instructions per head and key beside it.
#include <type_traits>

#include "cuda/chunk.h"
#include "cuda/mma.h"
#include "cuda/scorer.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kStages = 3, kMaxRows = 32;

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// How rows lie on warps; from shapes alone.
struct Layout {
  int parts;                 // warps of one row
  int row_tiles;             // column tiles of a row in one warp
  int warp_rows;             // rows of a warp
  int splits;                // warps that share a tile of keys
  int rows;                  // of a block
  std::int64_t spans, span;  // of keys, in keys
};

template <class T, int kDim>
struct Shape {
  static constexpr bool kCodes = std::is_same_v<T, E4M3>;
  using Number = std::conditional_t<kCodes, BF16, T>;       // that is multiplied
  static constexpr int kKeys = kDim > 128 ? 32 : 64;        // of a tile
  static constexpr int kTiles = kDim > 128 ? 4 : 8;         // of 8 heads, of a warp
  static constexpr int kPairs = kDim / 32;                  // pairs of steps along the channels
  static constexpr int kChunks = kDim / 8;                  // of a key, 8 channels each
  static constexpr int kMine = kKeys * kChunks / kThreads;  // chunks of a thread
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kRawBytes = kCodes ? kKeys * kDim : kTileBytes;
};

// Where a chunk of a key lies in a tile: halves of 64 bytes exchanged in odd rows, so that eight
// lanes that read two rows meet all banks.
template <int kChunks>
__device__ int place_of(int key, int chunk) {
  return key * kChunks + (chunk ^ (key & 1) << 2);
}

template <class T, int kDim>
struct Shared {
  using S = Shape<T, kDim>;
  uint4 converted[S::kCodes ? 2 : 1][S::kCodes ? S::kTileBytes / 16 : 1];
  unsigned char raw[kStages][S::kRawBytes];
  float sums[2][kMaxRows][S::kKeys];
  float factor[4][S::kKeys];                            // of a key's score; NaN where it is missing
  std::uint16_t power[S::kCodes ? 4 : 1][S::kKeys][8];  // bf16: of 32 channels, with 2^120
  std::int32_t exponent[4][S::kKeys];                   // MXFP8: of the key's largest scale
  float* out[kMaxRows];
  std::int64_t first[kMaxRows], last[kMaxRows];  // visible keys, of this block's span
  std::int32_t row_exponent[kMaxRows];
};

// ---- memory -------------------------------------------------------------------------------------
// The same into shared memory, by itself if it can.
template <class T>
__device__ void fetch_chunk(Chunk<T>* to, const T* p, int count) {
  if (count >= 8 && reinterpret_cast<std::uintptr_t>(p) % sizeof(Chunk<T>) == 0) {
    copy_async<sizeof(Chunk<T>)>(to, p);
  } else {
    *to = load_chunk(p, count);
  }
}

template <class T, int kDim>
struct Block {
  using S = Shape<T, kDim>;
  const Scorer& s;
  const Layout& layout;
  Shared<T, kDim>& shared;
  std::int64_t first_row;
  int rows;  // of this block

  // The tile of keys from `key` on, into stage and slot `n`; `row` is of their request.
  __device__ void fetch(int n, std::int64_t row, std::int64_t key, std::int64_t end) const {
    auto* to = reinterpret_cast<Chunk<T>*>(shared.raw[n % kStages]);
#pragma unroll
    for (int i = 0; i < S::kMine; ++i) {
      const int at = threadIdx.x + i * kThreads, j = at / S::kChunks, chunk = at % S::kChunks;
      const std::int64_t place = key + j < end ? s.places.offset(row, key + j) : -1;
      const int count = place < 0 ? 0 : s.dim - 8 * chunk;
      const int where = S::kCodes ? at : place_of<S::kChunks>(j, chunk);
      fetch_chunk(to + where, static_cast<const T*>(s.key) + place + 8 * chunk, count);
    }
    if (threadIdx.x < S::kKeys) fetch_scale(n % 4, row, key + threadIdx.x, end);
  }
  // What multiplies the score of a key, and in MXFP8 its channels.
  __device__ void fetch_scale(int slot, std::int64_t row, std::int64_t key,
                              std::int64_t end) const {
    const int j = threadIdx.x;
    float* factor = &shared.factor[slot][j];
    const bool missing = key >= end || s.places.offset(row, key) < 0;
    if constexpr (!S::kCodes) {
      *factor = missing ? NAN : 1;
    } else {
      const std::int64_t place = missing ? -1 : s.scale_places.offset(row, key);
      if (s.query_scale == nullptr) {
        for (int g = 0; g < 8; ++g) shared.power[slot][j][g] = kUnscaled;
        if (missing) *factor = NAN;
        if (!missing) copy_async<4>(factor, static_cast<const float*>(s.key_scale) + place);
      } else {
        const auto* scales = static_cast<const E8M0*>(s.key_scale) + place;
        const int groups = missing ? 0 : s.dim / 32, largest = largest_scale(scales, groups);
        for (int g = 0; g < 8; ++g) {
          shared.power[slot][j][g] =
              g < groups ? static_cast<std::uint16_t>(power_bits(scales[g], largest)) : 0;
        }
        shared.exponent[slot][j] = largest - 127;
        *factor = missing ? NAN : 1;
      }
    }
  }
  // This thread's chunks of raw tile `n`, which it fetched itself, as bf16.
  __device__ void convert(int n) const {
    const auto* from = reinterpret_cast<const uint2*>(shared.raw[n % kStages]);
#pragma unroll
    for (int i = 0; i < S::kMine; ++i) {
      const int at = threadIdx.x + i * kThreads, j = at / S::kChunks, chunk = at % S::kChunks;
      shared.converted[n % 2][place_of<S::kChunks>(j, chunk)] =
          codes_to_bf16(from[at], shared.power[n % 4][j][chunk / 4]);
    }
  }
  __device__ const uint4* tile(int n) const {
    if constexpr (S::kCodes) return shared.converted[n % 2];
    return reinterpret_cast<const uint4*>(shared.raw[n % kStages]);
  }

  // The scores of tile `n`, of rows [from, to) of the block.
  __device__ void put(int n, std::int64_t tile_key, int from, int to) const {
    for (int i = threadIdx.x; i < (to - from) * S::kKeys; i += kThreads) {
      const int r = from + i / S::kKeys, j = i % S::kKeys;
      const std::int64_t key = tile_key + j;
      if (key < shared.first[r] || key >= shared.last[r]) continue;
      float score = shared.sums[n % 2][r * layout.parts][j];
      for (int part = 1; part < layout.parts; ++part) {
        score += shared.sums[n % 2][r * layout.parts + part][j];
      }
      const float factor = shared.factor[n % 4][j];
      if (s.dot_scale != 1) score *= s.dot_scale;
      if constexpr (S::kCodes) {
        if (s.query_scale != nullptr) {
          score = ldexpf(score, shared.row_exponent[r] + shared.exponent[n % 4][j]);
        }
        score *= factor;
      } else if (isnan(factor)) {
        score = NAN;
      }
      shared.out[r][key] = score;
    }
  }
};

// The columns of a warp: queries and weights of its rows.
template <class T, int kDim>
struct Columns {
  using S = Shape<T, kDim>;
  using Number = typename S::Number;
  uint4 query[S::kTiles][S::kPairs];
  float weight[S::kTiles][2];
  int first_row, rows;  // of the block
  int first_head;       // of the first tile
  int slot;             // of the first row's sums
  bool whole;           // all columns are heads

  __device__ void load(const Block<T, kDim>& block, int group) {
    const Scorer& s = block.s;
    const Layout& layout = block.layout;
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4, part = group % layout.parts;
    first_row = group / layout.parts * layout.warp_rows;
    rows = min(layout.warp_rows, block.rows - first_row);
    first_head = part * S::kTiles * 8;
    slot = group * layout.warp_rows;
    whole = first_head + layout.row_tiles * 8 <= s.heads;
#pragma unroll
    for (int b = 0; b < S::kTiles; ++b) {
      const int r = b / layout.row_tiles, head = first_head + b % layout.row_tiles * 8;
      const std::int64_t row = block.first_row + first_row + r;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int h = head + 2 * c + e;
        weight[b][e] = r < rows && h < s.heads ? s.weight(row, h) : 0;
      }
      const bool there = r < rows && head + g < s.heads;
#pragma unroll
      for (int p = 0; p < S::kPairs; ++p) {
        const int channel = 32 * p + 8 * c;
        const auto* q = static_cast<const T*>(s.query) + row * s.query_row +
                        (head + g) * s.query_head + channel;
        const auto chunk = load_chunk(q, there ? s.dim - channel : 0);
        if constexpr (S::kCodes) {
          std::uint32_t power = kUnscaled;
          if (s.query_scale != nullptr && there && channel < s.dim) {
            const E8M0 scale =
                s.query_scale[row * s.query_scale_row + (head + g) * s.query_scale_head + p];
            power = power_bits(scale, block.shared.row_exponent[first_row + r] + 127);
          }
          query[b][p] = codes_to_bf16(chunk, power);
        } else {
          query[b][p] = chunk;
        }
      }
    }
  }

  // Sums over heads of 16 keys from key `m` of the tile on, into shared memory.
  __device__ void multiply(const Block<T, kDim>& block, const uint4* tile, int n, int m) const {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    float d[S::kTiles][4] = {};
#pragma unroll
    for (int p = 0; p < S::kPairs; ++p) {
      const uint4 low = tile[place_of<S::kChunks>(m + g, 4 * p + c)];
      const uint4 high = tile[place_of<S::kChunks>(m + g + 8, 4 * p + c)];
#pragma unroll
      for (int b = 0; b < S::kTiles; ++b)
        mma<Number>(d[b], low.x, high.x, low.y, high.y, query[b][p].x, query[b][p].y);
#pragma unroll
      for (int b = 0; b < S::kTiles; ++b)
        mma<Number>(d[b], low.z, high.z, low.w, high.w, query[b][p].z, query[b][p].w);
    }
    const float floor = block.s.floor;
    float sum[4] = {};
    auto add = [&](int b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fmaf(weight[b][i % 2], max_nan(d[b][i], floor), sum[i]);
    };
    auto finish = [&](int r) {
      const float low = sum[0] + sum[1], high = sum[2] + sum[3];
      float x = (c & 1) != 0 ? high : low;
      x += __shfl_xor_sync(~0u, (c & 1) != 0 ? low : high, 1);
      x += __shfl_xor_sync(~0u, x, 2);
      if (c < 2 && r < rows) block.shared.sums[n % 2][slot + r][m + g + 8 * c] = x;
    };
    auto add_rows = [&](auto tiles) {  // rows of so many tiles, all of whose columns are heads
#pragma unroll
      for (int b = 0; b < S::kTiles; ++b) {
        add(b);
        if ((b + 1) % tiles != 0) continue;
        finish(b / tiles);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 0;
      }
    };
    if (whole && block.layout.row_tiles == 8) return add_rows(Int<8>());
    if (whole && block.layout.row_tiles == 4) return add_rows(Int<4>());
    int left = block.layout.row_tiles, head = first_head, r = 0;
#pragma unroll
    for (int b = 0; b < S::kTiles; ++b) {
      if (head + 8 > block.s.heads) {  // what is no head may be NaN, of infinite keys
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (head + 2 * c + i % 2 >= block.s.heads) d[b][i] = 0;
        }
      }
      add(b);
      head += 8;
      if (--left > 0) continue;
      finish(r++);
      left = block.layout.row_tiles;
      head = first_head;
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = 0;
    }
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads, 1)
    score_kernel(const __grid_constant__ Scorer s, const __grid_constant__ Layout layout,
                 std::int64_t row_blocks) {
  using S = Shape<T, kDim>;
  extern __shared__ __align__(16) unsigned char bytes[];
  auto& shared = *reinterpret_cast<Shared<T, kDim>*>(bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The last rows, which often see most, first.
  const std::int64_t row_block = row_blocks - 1 - blockIdx.x / layout.spans;
  const std::int64_t span = s.first_key + blockIdx.x % layout.spans * layout.span;
  Block<T, kDim> block{s, layout, shared, s.first_row + row_block * layout.rows, 0};
  block.rows =
      static_cast<int>(min(static_cast<std::int64_t>(layout.rows), s.last_row - block.first_row));

  bool any = false;
  if (threadIdx.x < block.rows) {
    const std::int64_t row = block.first_row + threadIdx.x;
    Range r = s.visible(row);
    r.start = max(r.start, span);
    r.end = min(r.end, span + layout.span);
    any = r.start < r.end;
    shared.first[threadIdx.x] = any ? r.start : 0;
    shared.last[threadIdx.x] = any ? r.end : 0;
    shared.out[threadIdx.x] = s.scores_of(row);
  }
  if (S::kCodes && s.query_scale != nullptr) {
    for (int r = warp; r < block.rows; r += kWarps) {
      const E8M0* scales = s.query_scale + (block.first_row + r) * s.query_scale_row;
      int largest = 0;
      for (int h = lane; h < s.heads; h += 32)
        largest = max(largest, largest_scale(scales + h * s.query_scale_head, s.dim / 32));
      largest = __reduce_max_sync(~0u, largest);
      if (lane == 0) shared.row_exponent[r] = largest - 127;
    }
  }
  if (__syncthreads_or(any) == 0) return;

  Columns<T, kDim> columns;
  columns.load(block, warp / layout.splits);
  const int split = warp % layout.splits;

  // Rows of one request share tiles of keys.
  for (int from = 0, to; from < block.rows; from = to) {
    const std::int64_t row = block.first_row + from;
    std::int64_t first = INT64_MAX, last = 0;
    for (to = from; to < block.rows; ++to) {
      if (s.requests > 0 &&
          s.places.row_request[block.first_row + to] != s.places.row_request[row]) {
        break;
      }
      if (shared.first[to] < shared.last[to]) {
        first = min(first, shared.first[to]);
        last = max(last, shared.last[to]);
      }
    }
    if (first >= last) continue;
    first = first / S::kKeys * S::kKeys;
    const int tiles = static_cast<int>((last - first + S::kKeys - 1) / S::kKeys);
    const bool mine =
        columns.rows > 0 && columns.first_row < to && columns.first_row + columns.rows > from;
    auto key_of = [&](int n) { return first + static_cast<std::int64_t>(n) * S::kKeys; };
    for (int n = 0; n < kStages - 1; ++n) {
      if (n < tiles) block.fetch(n, row, key_of(n), last);
      copies_commit();
    }
    __syncthreads();
    for (int n = 0; n < tiles; ++n) {
      copies_wait<kStages - 2>();
      if constexpr (S::kCodes) block.convert(n);
      __syncthreads();
      if (n + kStages - 1 < tiles) {
        block.fetch(n + kStages - 1, row, key_of(n + kStages - 1), last);
      }
      copies_commit();
      if (mine) {
        for (int m = 16 * split; m < S::kKeys; m += 16 * layout.splits)
          columns.multiply(block, block.tile(n), n, m);
      }
      if (n > 0) block.put(n - 1, key_of(n - 1), from, to);
    }
    __syncthreads();
    block.put(tiles - 1, key_of(tiles - 1), from, to);
    copies_wait<0>();
    __syncthreads();
  }
}

template <class T, int kDim>
const Kernel kScore{score_kernel<T, kDim>, sizeof(Shared<T, kDim>)};

template <class T, int kDim>
Layout layout_of(const Scorer& s) {
  using S = Shape<T, kDim>;
  constexpr std::int64_t kMostSpan = 4096, kLeastSpan = 512, kBlocksPerProcessor = 8;
  auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t rows = s.last_row - s.first_row, keys = s.last_key - s.first_key;
  const int tiles = (s.heads + 7) / 8;
  Layout l{};
  l.parts = static_cast<int>(ceil_div(tiles, S::kTiles));
  l.row_tiles = l.parts > 1 ? S::kTiles : tiles;
  l.warp_rows = l.parts > 1 ? 1 : min(4, S::kTiles / tiles);
  // As many rows as share keys, as far as that can be told from shapes.
  const std::int64_t shared_rows = s.requests > 0 ? ceil_div(rows, s.requests) : rows;
  const std::int64_t wanted = ceil_div(shared_rows, l.warp_rows) * l.parts;
  int groups = kWarps;
  while (groups / 2 >= wanted && kWarps / groups * 2 <= S::kKeys / 16) groups /= 2;
  l.splits = kWarps / groups;
  l.rows = groups / l.parts * l.warp_rows;
  const std::int64_t row_blocks = ceil_div(rows, l.rows);
  const std::int64_t for_all = ceil_div(kBlocksPerProcessor * processors(), row_blocks);
  l.spans = max(ceil_div(keys, kMostSpan), min(for_all, ceil_div(keys, kLeastSpan)));
  l.span = ceil_div(ceil_div(keys, l.spans), S::kKeys) * S::kKeys;
  return l;
}

template <class T, int kDim>
void score_typed(const char* operation, const Scorer& s, cudaStream_t stream) {
  const Layout l = layout_of<T, kDim>(s);
  const std::int64_t row_blocks = (s.last_row - s.first_row + l.rows - 1) / l.rows;
  kScore<T, kDim>.launch(operation,
                         {.grid = dim3(static_cast<unsigned>(row_blocks * l.spans)),
                          .block = dim3(kThreads),
                          .shared_bytes = sizeof(Shared<T, kDim>),
                          .stream = stream},
                         s, l, row_blocks);
}

template <class T>
void score_numbers(const char* operation, const Scorer& s, cudaStream_t stream) {
  if (s.dim <= 64) return score_typed<T, 64>(operation, s, stream);
  if (s.dim <= 128) return score_typed<T, 128>(operation, s, stream);
  score_typed<T, 256>(operation, s, stream);
}

}  // namespace

void score(const char* operation, const Scorer& s, cudaStream_t stream) {
  if (s.first_row == s.last_row || s.first_key == s.last_key || s.width == 0) return;
  switch (s.dtype) {
    case DType::kF32: return score_f32(operation, s, stream);
    case DType::kBF16: return score_numbers<BF16>(operation, s, stream);
    case DType::kF16: return score_numbers<F16>(operation, s, stream);
    case DType::kE4M3: return score_numbers<E4M3>(operation, s, stream);
    default: return;
  }
}

}  // namespace winnow::cuda
