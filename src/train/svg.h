// The little of SVG that the report draws with. Colours are CSS classes, so that a page's light and
// dark themes apply.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace winnow::train {

std::string html_escape(const std::string& text);

struct Series {
  std::string css_class;  // "a", "b", ...: colours of the page
  std::string name;       // in the legend; "" leaves it out
  std::vector<double> x, y;
  bool dots = false;  // points instead of a line
};

// A stretch of the x axis with a name: a stage.
struct Band {
  double from = 0, to = 0;
  std::string name;
};

// Lines over a common x axis with grid, axis labels and legend. The y axis is logarithmic: both the
// first steps and the small changes of the last ones can be read. All y must be positive.
std::string line_chart(const std::vector<Series>& series, const std::vector<Band>& bands,
                       const std::string& x_label, const std::string& y_label);

struct Bar {
  std::string name;
  double value = 0;  // 0 to 1
};
// Horizontal bars from 0 to 100 %.
std::string bar_chart(const std::vector<Bar>& bars);

// One line of cells per row: a cell at `x` is set where rows[r] holds x (ascending), the part of
// the line from 0 to widths[r] - 1 is shaded as what could be set.
std::string cell_picture(const std::vector<std::vector<int>>& rows, std::span<const int> widths,
                         int columns);

}  // namespace winnow::train
