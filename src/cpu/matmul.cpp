// nn::matmul in f32: C = A . B or C += A . B, operands row-major or transposed.
//
// Two ways, the same bits.
// - Blocks. C is cut into tasks of up to 240 rows x 256 columns, smaller ones where many threads
//   would wait; K into blocks of at most 512. A task packs its part of B into panels [k][16]
//   (32 KiB: L1) and about 60 rows of A at a time into tiles (120 KiB: L2), and multiplies tile by
//   panel in registers. C is read back between the blocks of k, so the chain of an element simply
//   continues. A transposed B is packed panel by panel just before use, while the next one's rows
//   are prefetched between runs of FMAs.
// - Few rows (at most 32) of A times a transposed B, a decode step's linear layers: the roles
//   change. The rows of A are the 16 lanes, and the rows of B are broadcast from where they lie:
//   the large operand is read once, in order, and never packed.
//
// Order: one chain of multiply-adds per element, k ascending, from +0 or from C; fused on AVX2, and
// then equal to a scalar fmaf loop. A row of the result depends on nothing but its row of A and B.
// Bound by the FMA units (12 FMAs, 8 loads per k and tile); up to 8 rows by reading B.
// Measured on one core of a busy Zen 3 machine, as a share of the bare 6 x 16 tile beside it
// (itself 55 to 95 GFLOP/s); medians of six runs (one disturbed value left out): 512^3 nt 0.55 to
// 0.75, nn 0.57 to 0.86, tn 0.43 to 0.79; 2048 x 768 x 768 nt 0.64 to 0.84; 4096 x 256 x 256 nt
// 0.63 to 0.77, nn 0.61 to 0.81; 16 x 2048 x 2048 nt 0.63 to 0.74; 1 x 2048 x 2048 nt reads B at 7
// to 9 GB/s. A quiet machine: docs/performance.md. No gain seen: prefetching broadcast rows of B,
// or packed panels for later blocks of rows.
#include "cpu/matmul.h"

#include "base/parallel.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kDepth = 512;                         // most k of a block
constexpr std::int64_t kBlockTiles = 60 / kTileRows;         // tiles of A packed at once
constexpr std::int64_t kTaskTiles = 240 / kTileRows;         // most tiles of a task
constexpr std::int64_t kTaskColumns = 256;                   // most columns of a task
constexpr std::int64_t kLeastRows = 48, kLeastColumns = 64;  // of a task cut for more threads
constexpr std::int64_t kFewRows = 32;       // rows of A that are lanes rather than tiles
constexpr std::int64_t kFewColumns = 96;    // columns of a task then
constexpr std::int64_t kUnpackedRows = 12;  // up to here a row-major B is not worth packing
constexpr std::int64_t kRun = 64;           // k between two steps of the prefetcher

constexpr std::int64_t kMostRows = std::int64_t{1} << 30;  // tiles count in 32 bits

// Element (i, j) lies at data[i * down + j * right].
struct Matrix {
  float* data;
  std::int64_t rows, columns, down, right;
  explicit Matrix(const Tensor& t)
      : data(t.as<float>()),
        rows(t.shape[0]),
        columns(t.shape[1]),
        down(t.shape[0] > 1 ? t.strides[0] : 1),
        right(t.shape[1] > 1 ? t.strides[1] : 1) {}
  float* at(std::int64_t i, std::int64_t j) const { return data + i * down + j * right; }
};

// The call with C's rows contiguous: a transposed C is C^T = B^T . A^T.
struct Product {
  Matrix a, b, c;
  bool accumulate;

  static Product of(const MatmulArgs& args) {
    if (args.c.shape[1] > 1 && args.c.strides[1] != 1) {
      return {Matrix(args.b.transposed()), Matrix(args.a.transposed()), Matrix(args.c.transposed()),
              args.accumulate};
    }
    return {Matrix(args.a), Matrix(args.b), Matrix(args.c), args.accumulate};
  }
  std::int64_t depth() const { return a.columns; }
  bool few_rows() const { return a.rows <= kFewRows && b.down == 1; }
  bool unpacked() const { return a.rows <= kUnpackedRows && b.right == 1; }
};

// An even split of `total` into the fewest parts of at most `most`, in multiples of `unit`.
struct Parts {
  std::int64_t total, count, size;
  Parts(std::int64_t whole, std::int64_t most, std::int64_t unit)
      : total(whole),
        count((whole + most - 1) / most),
        size(count == 0 ? 0 : ((whole + count - 1) / count + unit - 1) / unit * unit) {}
  std::int64_t first(std::int64_t part) const { return min64(total, part * size); }
  std::int64_t extent(std::int64_t part) const { return first(part + 1) - first(part); }
};

// Sixteen lanes, or eight where no more rows are there.
template <class V>
WINNOW_INLINE V load_lanes(const float* p) {
  if constexpr (sizeof(V) == sizeof(F8)) {
    return load(p);
  } else {
    return load16(p);
  }
}
template <class V>
WINNOW_INLINE V splat_lanes(float x) {
  if constexpr (sizeof(V) == sizeof(F8)) {
    return splat(x);
  } else {
    return splat16(x);
  }
}

// acc[r][lane] += sum_k a[k * a_k + r * a_r] * b[k * b_k + lane]
template <int MR, class V>
WINNOW_INLINE void multiply_lanes(const float* a, std::int64_t a_k, std::int64_t a_r,
                                  const float* b, std::int64_t b_k, std::int64_t depth,
                                  V (&acc)[MR]) {
#pragma GCC unroll 4
  for (std::int64_t k = 0; k < depth; ++k) {
    const V lanes = load_lanes<V>(b);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r] = fma(splat_lanes<V>(a[r * a_r]), lanes, acc[r]);
    a += a_k;
    b += b_k;
  }
}

// Up to 16 lanes, `lane` apart, of length K with elements `step` apart -> panel [K][16]. One of the
// two strides is 1. Spare lanes hold anything: no lane reads another.
void pack_lanes(const float* base, std::int64_t lane, std::int64_t step, std::int64_t valid,
                std::int64_t K, float* out) {
  if (step == 1) {
    pack_panel(base, lane, valid, K, out);
  } else if (valid == kPanel) {
    for (std::int64_t k = 0; k < K; ++k) {
      store(out + k * kPanel, load(base + k * step));
      store(out + k * kPanel + 8, load(base + k * step + 8));
    }
  } else {
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t i = 0; i < kPanel; ++i) {
        out[k * kPanel + i] = base[k * step + min64(i, valid - 1) * lane];
      }
    }
  }
}

// The tiles [first, first + count) of A, columns [k0, k0 + depth), one after the other.
void pack_tiles(const Matrix& a, const Tiles& tiles, std::int64_t first, std::int64_t count,
                std::int64_t k0, std::int64_t depth, float* out) {
  auto place = [&](std::int64_t t) {
    return (tiles.first(static_cast<int>(t)) - tiles.first(static_cast<int>(first))) * depth;
  };
  if (a.right == 1) {
    for (std::int64_t t = first; t < first + count; ++t) {
      const int tile = static_cast<int>(t);
      pack_tile(a.at(tiles.first(tile), k0), a.down, tiles.rows(tile), depth, out + place(t));
    }
    return;
  }
  // A transposed A: a few lines per k hold all tiles' rows; they stay in L1 for 64 k.
  for (std::int64_t k = 0; k < depth; k += kRun) {
    const std::int64_t run = min64(kRun, depth - k);
    for (std::int64_t t = first; t < first + count; ++t) {
      const int tile = static_cast<int>(t);
      with_rows(
          tiles.rows(tile), [&]<int MR>() __attribute__((always_inline)) {
            const float* from = a.at(tiles.first(tile), k0 + k);
            float* to = out + place(t) + k * MR;
            for (std::int64_t x = 0; x < run; ++x) {
              __builtin_memcpy(to + x * MR, from + x * a.right, MR * sizeof(float));
            }
          });
    }
  }
}

// Loads a tile of C (or zeros), lets `kernel` work on it, stores it; part of a panel's columns pass
// through a copy.
template <int MR, class Kernel>
WINNOW_INLINE void with_tile_of_c(float* c, std::int64_t down, int columns, bool from_zero,
                                  Kernel&& kernel) {
  Wide acc[MR];
  float edge[MR][kPanel];
  float* at = c;
  if (columns < kPanel) {
    for (int r = 0; r < MR; ++r) {
      for (int j = 0; j < kPanel; ++j) {
        edge[r][j] = !from_zero && j < columns ? c[r * down + j] : 0.f;
      }
    }
    at = edge[0];
  }
  const std::int64_t stride = columns < kPanel ? kPanel : down;
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) acc[r] = from_zero ? zero16() : load16(at + r * stride);
  kernel(acc);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) store(at + r * stride, acc[r]);
  if (columns < kPanel) {
    for (int r = 0; r < MR; ++r) {
      for (int j = 0; j < columns; ++j) c[r * down + j] = edge[r][j];
    }
  }
}

// How the work of the blocked way is cut. An element's chain knows nothing of it, so the number of
// threads may have a say.
struct Blocks {
  Tiles tiles;
  Parts rows, columns, depth;
  std::int64_t panels;      // most of one task
  std::int64_t block_rows;  // most rows of A packed at once
  explicit Blocks(const Product& p)
      : tiles(static_cast<int>(p.c.rows)),
        rows(tiles.count, kTaskTiles, 1),
        columns(p.c.columns, kTaskColumns, kPanel),
        depth(p.depth(), kDepth, 8) {
    // Two tasks per thread, where they are not too small: halving the longer side packs least.
    while (num_threads() > 1 && tasks() < 2 * num_threads()) {
      const bool long_rows = rows.size * kTileRows >= columns.size;
      if (long_rows && rows.size * kTileRows >= 2 * kLeastRows) {
        rows = Parts(tiles.count, (rows.size + 1) / 2, 1);
      } else if (columns.size >= 2 * kLeastColumns) {
        columns = Parts(p.c.columns, columns.size / 2, kPanel);
      } else {
        break;
      }
    }
    panels = (columns.size + kPanel - 1) / kPanel;
    block_rows = min64(rows.size, kBlockTiles) * kTileRows;
  }
  std::int64_t tasks() const { return rows.count * columns.count; }
};

// One worker's packed operands.
struct Packed {
  float *a, *b;
  Packed(const Blocks& blocks, Carve& carve)
      : a(carve.take<float>(blocks.block_rows * blocks.depth.size + kTileSlack)),
        b(carve.take<float>(blocks.panels * kPanel * blocks.depth.size)) {}
};

// Columns [j0, j0 + columns) of the tiles of one task.
class BlockTask {
 public:
  BlockTask(const Product& product, const Blocks& blocks, Packed packed, std::int64_t task)
      : p_(product),
        blocks_(blocks),
        packed_(packed),
        first_tile_(blocks.rows.first(task / blocks.columns.count)),
        tiles_(blocks.rows.extent(task / blocks.columns.count)),
        j0_(blocks.columns.first(task % blocks.columns.count)),
        columns_(blocks.columns.extent(task % blocks.columns.count)) {}

  void run() {
    for (std::int64_t part = 0; part < blocks_.depth.count; ++part) {
      k0_ = blocks_.depth.first(part);
      depth_ = blocks_.depth.extent(part);
      from_zero_ = part == 0 && !p_.accumulate;
      if (p_.b.down != 1 && !p_.unpacked()) pack_rows_of_b();
      for (std::int64_t t = 0; t < tiles_; t += kBlockTiles) {
        multiply_block(t, min64(kBlockTiles, tiles_ - t));
      }
    }
  }

 private:
  int columns_of(std::int64_t panel) const {
    return static_cast<int>(min64(kPanel, columns_ - panel * kPanel));
  }

  // A row-major B, four panels at a time: a row's part is then 256 bytes side by side, and no more
  // than four of the panels, which lie a multiple of 4 KiB apart, compete for a set of L1.
  void pack_rows_of_b() {
    constexpr std::int64_t kGroup = 4;
    const std::int64_t full = columns_ / kPanel;
    for (std::int64_t first = 0; first < full; first += kGroup) {
      const std::int64_t group = min64(kGroup, full - first);
      for (std::int64_t k = 0; k < depth_; ++k) {
        const float* from = p_.b.at(k0_ + k, j0_ + first * kPanel);
        float* to = packed_.b + (first * depth_ + k) * kPanel;
        for (std::int64_t panel = 0; panel < group; ++panel) {
          store(to, load(from));
          store(to + 8, load(from + 8));
          from += kPanel;
          to += kPanel * depth_;
        }
      }
    }
    if (columns_ % kPanel != 0) pack_panel_of_b(full, packed_.b + full * kPanel * depth_);
  }

  void pack_panel_of_b(std::int64_t panel, float* out) {
    pack_lanes(p_.b.at(k0_, j0_ + panel * kPanel), p_.b.right, p_.b.down, columns_of(panel), depth_,
               out);
  }

  void multiply_block(std::int64_t first, std::int64_t count) {
    pack_tiles(p_.a, blocks_.tiles, first_tile_ + first, count, k0_, depth_, packed_.a);
    const std::int64_t panels = (columns_ + kPanel - 1) / kPanel;
    for (std::int64_t panel = 0; panel < panels; ++panel) {
      const int columns = columns_of(panel);
      const float* b = packed_.b + panel * kPanel * depth_;
      std::int64_t b_k = kPanel;
      Prefetcher ahead(depth_ * 4);
      if (p_.unpacked() && columns == kPanel) {
        b = p_.b.at(k0_, j0_ + panel * kPanel);
        b_k = p_.b.down;
      } else if (p_.unpacked() || (p_.b.down == 1 && first == 0)) {
        // With a single block of tiles a panel serves once: the same memory for all stays warm.
        float* out = packed_.b + (tiles_ <= kBlockTiles ? 0 : panel * kPanel * depth_);
        pack_panel_of_b(panel, out);
        b = out;
        if (p_.b.down == 1 && panel + 1 < panels) {
          for (int i = 0; i < columns_of(panel + 1); ++i) {
            ahead.add(p_.b.at(k0_, j0_ + (panel + 1) * kPanel + i));
          }
        }
      }
      multiply_panel(first, count, b, b_k, panel, ahead);
    }
  }

  void multiply_panel(std::int64_t first, std::int64_t count, const float* b, std::int64_t b_k,
                      std::int64_t panel, Prefetcher& ahead) {
    const Tiles& tiles = blocks_.tiles;
    const int columns = columns_of(panel), tile0 = static_cast<int>(first_tile_ + first);
    const int lines = static_cast<int>(kPanel * depth_ * 4 / 64 * kRun / (depth_ * count)) + 2;
    for (int t = tile0; t < tile0 + count; ++t) {
      const float* a = packed_.a + (tiles.first(t) - tiles.first(tile0)) * depth_;
      float* c = p_.c.at(tiles.first(t), j0_ + panel * kPanel);
      if (!from_zero_ && t + 1 < tile0 + count) {
        for (int r = 0; r < tiles.rows(t + 1); ++r) {
          prefetch_l1(c + (tiles.rows(t) + r) * p_.c.down);
        }
      }
      with_rows(
          tiles.rows(t), [&]<int MR>() __attribute__((always_inline)) {
            with_tile_of_c<MR>(
                c, p_.c.down, columns,
                from_zero_, [&](Wide(&acc)[MR]) __attribute__((always_inline)) {
                  for (std::int64_t k = 0; k < depth_; k += kRun) {
                    ahead.step(lines);
                    multiply_lanes(a + k * MR, MR, 1, b + k * b_k, b_k, min64(kRun, depth_ - k),
                                   acc);
                  }
                });
          });
    }
  }

  const Product& p_;
  const Blocks& blocks_;
  Packed packed_;
  std::int64_t first_tile_, tiles_, j0_, columns_;
  std::int64_t k0_ = 0, depth_ = 0;
  bool from_zero_ = true;
};

// Rows [j, j + MR) of B^T, broadcast, times 8 or 16 rows of A, the lanes of V.
template <int MR, class V>
WINNOW_INLINE void multiply_few(const Product& p, const float* lanes, std::int64_t row,
                                std::int64_t j) {
  constexpr std::int64_t kLanes = sizeof(V) / sizeof(float);
  const std::int64_t rows = min64(kLanes, p.c.rows - row);
  V acc[MR];
  float tile[MR][kLanes] = {};
  for (std::int64_t i = 0; p.accumulate && i < rows; ++i) {
    for (int r = 0; r < MR; ++r) tile[r][i] = *p.c.at(row + i, j + r);
  }
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) acc[r] = load_lanes<V>(tile[r]);
  multiply_lanes(p.b.at(0, j), 1, p.b.right, lanes, kPanel, p.depth(), acc);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) store(tile[r], acc[r]);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (int r = 0; r < MR; ++r) *p.c.at(row + i, j + r) = tile[r][i];
  }
}

void run_few_rows(const Product& p, Workspace workspace) {
  const std::int64_t panels = (p.c.rows + kPanel - 1) / kPanel, depth = p.depth();
  auto* lanes = Carve(workspace.data).take<float>(panels * kPanel * depth);
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    pack_lanes(p.a.at(panel * kPanel, 0), p.a.down, p.a.right,
               min64(kPanel, p.a.rows - panel * kPanel), depth, lanes + panel * kPanel * depth);
  }
  parallel_for(ceil_div(p.c.columns, kFewColumns), [&](std::int64_t task, int) {
    const std::int64_t j0 = task * kFewColumns;
    const Tiles tiles(static_cast<int>(min64(kFewColumns, p.c.columns - j0)));
    for (int t = 0; t < tiles.count; ++t) {
      for (std::int64_t panel = 0; panel < panels; ++panel) {
        const float* b = lanes + panel * kPanel * depth;
        const std::int64_t row = panel * kPanel, j = j0 + tiles.first(t);
        with_rows(tiles.rows(t), [&]<int MR>() {
          if (p.c.rows - row <= 8) {
            multiply_few<MR, F8>(p, b, row, j);
          } else {
            multiply_few<MR, Wide>(p, b, row, j);
          }
        });
      }
    }
  });
}

void run_blocks(const Product& p, Workspace workspace) {
  const Blocks blocks(p);
  Carve count(nullptr);
  const Packed one(blocks, count);
  const std::int64_t stride = count.used();
  auto* memory = Carve(workspace.data).take<char>(0);
  parallel_for(blocks.tasks(), [&](std::int64_t task, int worker) {
    Carve carve(memory + worker * stride);
    BlockTask(p, blocks, Packed(blocks, carve), task).run();
  });
}

void run(const MatmulArgs& args, Workspace workspace) {
  const Product p = Product::of(args);
  if (p.c.rows == 0 || p.c.columns == 0) return;
  if (p.depth() == 0) {
    for (std::int64_t i = 0; !p.accumulate && i < p.c.rows; ++i) {
      for (std::int64_t j = 0; j < p.c.columns; ++j) *p.c.at(i, j) = 0;
    }
  } else if (p.few_rows()) {
    run_few_rows(p, workspace);
  } else {
    run_blocks(p, workspace);
  }
}

std::int64_t workspace_bytes(const MatmulArgs& args) {
  const Product p = Product::of(args);
  if (p.c.rows == 0 || p.c.columns == 0 || p.depth() == 0) return 0;
  Carve carve(nullptr);
  if (p.few_rows()) {
    carve.take<float>((p.c.rows + kPanel - 1) / kPanel * kPanel * p.depth());
  } else {
    const Blocks blocks(p);
    const std::int64_t workers = min64(blocks.tasks(), num_threads());
    for (std::int64_t worker = 0; worker < workers; ++worker) const Packed packed(blocks, carve);
  }
  return carve.bytes_to_ask();
}

bool unit_stride(const Tensor& t, int axis) { return t.shape[axis] <= 1 || t.strides[axis] == 1; }

Refusal refuse(const MatmulArgs& args) {
  for (const Tensor& t : {args.a, args.b, args.c}) {
    if (t.shape[0] > kMostRows || t.shape[1] > kMostRows) return "an axis is longer than 2^30";
  }
  if (args.a.dtype != DType::kF32) return "it multiplies f32 only";
  if (!unit_stride(args.a, 0) && !unit_stride(args.a, 1)) return "a has stride 1 on neither axis";
  if (!unit_stride(args.b, 0) && !unit_stride(args.b, 1)) return "b has stride 1 on neither axis";
  if (!unit_stride(args.c, 0) && !unit_stride(args.c, 1)) return "c has stride 1 on neither axis";
  return "";
}

}  // namespace

extern const Implementation<MatmulArgs> matmul_implementation;
const Implementation<MatmulArgs> matmul_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                          workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
