// Problems of tile_scales. Every implementation gives the bytes of the reference.
#include "winnow/tile_scales.h"

#include <algorithm>
#include <vector>

#include "bench/data.h"
#include "bench/operation_case.h"
#include "bench/operations.h"
#include "bench/quantised.h"
#include "ref/implementations.h"

namespace winnow::bench {
namespace {

class TileScalesCase : public OperationCase<tile_scales, tile_scales_workspace_bytes> {
 public:
  explicit TileScalesCase(const Problem& p) : inverse_(p.flag("inverse")) {
    const std::int64_t tokens = p.number("tokens"), sequences = p.number("sequences"),
                       heads = p.number("heads"), groups = p.number("groups");
    Random random(static_cast<std::uint64_t>(p.number("seed")));
    const std::int64_t rows = scale_token_capacity(tokens, sequences, heads) * heads;
    const std::int64_t tiles = std::max<std::int64_t>(0, rows / kScaleTileRows - p.number("short"));
    scale_ = Guarded(DType::kE8M0, {tokens, heads, groups});
    tiles_ = Guarded(DType::kE8M0, {tiles, (groups + 3) / 4, kScaleTileBytes});
    want_ = inverse_ ? Guarded(DType::kE8M0, {tokens, heads, groups})
                     : Guarded(DType::kE8M0, {tiles, (groups + 3) / 4, kScaleTileBytes});
    cu_ = Guarded(DType::kI32, {sequences + 1});
    padded_ = Guarded(DType::kI32, {sequences + 1});
    args_ = {scale_, cu_, padded_, tiles_, inverse_};
    if (ShapesOnly::on()) return;
    // Lengths of every kind, empty sequences among them; the last tokens belong to none.
    std::vector<std::int32_t> boundaries = {0};
    for (std::int64_t s = 0; s < sequences; ++s) {
      const std::int64_t left = tokens - boundaries.back();
      const std::int64_t length = s % 3 == 1 ? 0 : random.below(left + 1);
      boundaries.push_back(boundaries.back() + static_cast<std::int32_t>(length));
    }
    std::ranges::copy(boundaries, cu_.view().as<std::int32_t>());
    std::ranges::copy(padded_cu_seqlens(boundaries, heads), padded_.view().as<std::int32_t>());
    const Tensor& input = inverse_ ? tiles_ : scale_;
    for (std::int64_t i = 0; i < input.elements(); ++i) {
      input.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(random.below(256));
    }
  }

  std::vector<Tensor> outputs() const override { return {inverse_ ? scale_ : tiles_}; }

  std::vector<Comparison> compare() override {
    TileScalesArgs want = args_;
    (inverse_ ? want.scale : want.tiles) = want_;
    ref::tile_scales_implementation.run(want, {});
    return {equal_numbers(inverse_ ? "scale" : "tiles", inverse_ ? scale_ : tiles_, want_)};
  }

  Cost cost() const override { return {0, bytes_of_tensor(scale_) + bytes_of_tensor(tiles_)}; }

 private:
  bool inverse_;
  Guarded scale_, cu_, padded_, tiles_, want_;
};

}  // namespace

Operation tile_scales_operation() {
  return {
      "tile_scales",
      "scales of MXFP8 into tiles of 128 x 4, and back",
      {{"tokens", "200", "tokens", kInt32},
       {"sequences", "5", "packed sequences; every third is empty"},
       {"heads", "1", "heads of a token", {1, 1 << 24}},
       {"groups", "4", "scales of a head"},
       {"short", "0", "tiles fewer than the capacity"},
       {"inverse", "0", "1: from the tiles back", kFlag},
       {"seed", "1", "of the data"}},
      [](const Problem& p) -> std::unique_ptr<Case> { return std::make_unique<TileScalesCase>(p); },
      {"tile_scales", "tile_scales inverse=1", "tile_scales heads=64 tokens=33",
       "tile_scales heads=64 tokens=33 inverse=1", "tile_scales heads=32 groups=5 tokens=90",
       "tile_scales heads=32 groups=5 tokens=90 inverse=1", "tile_scales heads=3 groups=1 short=1",
       "tile_scales heads=3 groups=1 short=1 inverse=1", "tile_scales tokens=0 sequences=0",
       "tile_scales tokens=0 sequences=0 inverse=1", "tile_scales heads=128 groups=8 tokens=7"},
      {"tile_scales tokens=4096 heads=64 sequences=4"}};
}

}  // namespace winnow::bench
