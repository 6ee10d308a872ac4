// The picture of a layout: a line per rank, a box per stage, a cell per layer.
#include <algorithm>
#include <array>

#include "plan/report.h"

namespace winnow::plan {
namespace {

constexpr int kCell = 26, kGap = 3, kBox = 12, kTop = 58, kLeft = 74;

struct Cell {
  std::string text, css_class, title;
};

// The shade of the group of layers that attend to one selection.
std::string shade(std::size_t group) { return fmt::format("g{}", group % 4); }

// Layers that attend to the selection of the same layer, counted over the model.
class Groups {
 public:
  std::size_t of(std::int64_t source) {
    const auto found = std::find(sources_.begin(), sources_.end(), source);
    if (found != sources_.end()) return static_cast<std::size_t>(found - sources_.begin());
    sources_.push_back(source);
    return sources_.size() - 1;
  }

 private:
  std::vector<std::int64_t> sources_;
};

Cell layer_cell(const PlanConfig& c, std::int64_t layer, const std::string& text, Groups& groups) {
  if (!c.is_dsa(layer)) return {text, "plain", fmt::format("layer {}", layer)};
  const std::int64_t source = index_source(c.model.sharing, layer);
  const std::string group = shade(groups.of(source));
  if (source == layer) {
    return {text, "computes " + group, fmt::format("layer {} computes indices", layer)};
  }
  return {text, "reuses " + group, fmt::format("layer {} reuses those of {}", layer, source)};
}

std::vector<Cell> stage_cells(const PlanConfig& c, const Stage& stage, Groups& groups) {
  std::vector<Cell> cells;
  if (stage.embedding) cells.push_back({"E", "end", "embedding"});
  for (std::int64_t n = 0; n < stage.layers; ++n) {
    const std::int64_t layer = stage.first_layer + n;
    cells.push_back(layer_cell(c, layer, fmt::format("{}", layer), groups));
  }
  for (std::int64_t d = 0; d < stage.mtp_depths; ++d) {
    Cell cell = layer_cell(c, c.model.layers + 1, "m", groups);
    cell.title += fmt::format(", depth {}", d);
    if (d > 0 && c.model.mtp_shared_components.sparse_attention_index && !c.hybrid()) {
      cell.css_class.replace(0, cell.css_class.find(' '), "reuses");
      cell.title = fmt::format("depth {} reuses the indices of depth 0", d);
    }
    cells.push_back(cell);
  }
  if (stage.loss) cells.push_back({"L", "end", "loss"});
  return cells;
}

std::string style() {
  constexpr std::array<const char*, 4> kShades = {"#2b6cb0", "#b7791f", "#2f855a", "#9b2c6b"};
  std::string css =
      "<style>text{font:12px system-ui,sans-serif;fill:#333}.cell text{text-anchor:middle}"
      ".box{fill:#f4f4f2;stroke:#ccc}.end rect{fill:#555}.end text,.computes text{fill:#fff}"
      ".plain rect{fill:#ddd}";
  for (std::size_t g = 0; g < kShades.size(); ++g) {
    css += fmt::format(".g{0} rect{{fill:{1};stroke:{1}}}", g, kShades[g]);
  }
  return css + ".reuses rect{fill-opacity:.18}</style>";
}

}  // namespace

std::string layout_picture(const PlanConfig& c, const PipelineLayout& layout) {
  Groups groups;
  std::vector<std::vector<Cell>> stages;
  std::vector<std::size_t> widest(static_cast<std::size_t>(layout.virtual_stages), 1);
  for (const Stage& stage : layout.stages) {
    stages.push_back(stage_cells(c, stage, groups));
    std::size_t& most = widest[static_cast<std::size_t>(stage.virtual_stage)];
    most = std::max(most, stages.back().size());
  }
  const auto width_of = [](std::size_t cells) {
    return static_cast<int>(cells) * (kCell + kGap) - kGap + kBox;
  };
  std::vector<int> left = {kLeft};
  for (const std::size_t cells : widest) left.push_back(left.back() + width_of(cells) + 2 * kGap);
  constexpr int kLine = kCell + kBox + 2 * kGap, kLeastWidth = 520;
  const int height = kTop + static_cast<int>(layout.ranks) * kLine + 8;

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\">{2}\n<text x=\"8\" y=\"20\">{3}</text>\n<text x=\"8\" y=\"40\">"
      "filled: computes indices; pale: reuses those of the filled layer before it of its colour"
      "</text>\n",
      std::max(left.back() + 8, kLeastWidth), height, style(), layout_text(layout));
  for (std::int64_t rank = 0; rank < layout.ranks; ++rank) {
    out += fmt::format("<text x=\"8\" y=\"{}\">rank {}</text>\n",
                       kTop + static_cast<int>(rank) * kLine + kLine / 2, rank);
  }
  for (const Stage& stage : layout.stages) {
    const std::vector<Cell>& cells = stages[static_cast<std::size_t>(stage.number)];
    const int x = left[static_cast<std::size_t>(stage.virtual_stage)];
    const int y = kTop + static_cast<int>(stage.rank) * kLine;
    out += fmt::format(
        "<rect class=\"box\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"4\"><title>stage {}"
        "</title></rect>\n",
        x, y, width_of(std::max<std::size_t>(cells.size(), 1)), kCell + kBox, stage.number);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const int cell_x = x + kBox / 2 + static_cast<int>(i) * (kCell + kGap), cell_y = y + kBox / 2;
      out += fmt::format(
          "<g class=\"cell {}\"><title>{}</title><rect x=\"{}\" y=\"{}\" width=\"{}\" "
          "height=\"{}\" rx=\"3\"/><text x=\"{}\" y=\"{}\">{}</text></g>\n",
          cells[i].css_class, cells[i].title, cell_x, cell_y, kCell, kCell, cell_x + kCell / 2,
          cell_y + kCell / 2 + 4, cells[i].text);
    }
  }
  return out + "</svg>\n";
}

}  // namespace winnow::plan
