#include "train/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace winnow::train {
namespace {

constexpr double kWidth = 760, kHeight = 300, kLeft = 52, kRight = 12, kTop = 26, kBottom = 40;

// A step of 1, 2 or 5 times a power of ten that cuts the span into about `count` parts.
double nice_step(double span, int count) {
  const double raw = std::max(span, 1e-9) / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

std::string text_at(double x, double y, const std::string& anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", x, y, anchor,
                     html_escape(text));
}

struct Axis {
  double low = 0, high = 1, from = 0, to = 1;  // values and pixels
  bool logarithmic = false;
  double at(double v) const {
    const double part = logarithmic ? std::log(std::max(v, low) / low) / std::log(high / low)
                                    : (v - low) / (high - low);
    return from + part * (to - from);
  }
};

// 1, 2, 3 and 5 times powers of ten, from the last at or below `low` to the first at or above
// `high`.
std::vector<double> log_ticks(double low, double high) {
  std::vector<double> ticks;
  for (double power = std::pow(10, std::floor(std::log10(low)));; power *= 10) {
    for (double factor : {1.0, 2.0, 3.0, 5.0}) {
      const double tick = factor * power;
      if (tick <= low) ticks.clear();
      ticks.push_back(tick);
      if (tick >= high && ticks.size() > 1) return ticks;
    }
  }
}

std::string draw(const Series& s, const Axis& x, const Axis& y) {
  std::string out;
  if (s.dots) {
    for (std::size_t i = 0; i < s.x.size(); ++i) {
      out += fmt::format("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"/>",
                         s.css_class, x.at(s.x[i]), y.at(s.y[i]));
    }
    return out;
  }
  out = fmt::format("<polyline class=\"{}\" points=\"", s.css_class);
  for (std::size_t i = 0; i < s.x.size(); ++i) {
    out += fmt::format("{:.1f},{:.1f} ", x.at(s.x[i]), y.at(s.y[i]));
  }
  return out + "\"/>";
}

}  // namespace

std::string html_escape(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string line_chart(const std::vector<Series>& series, const std::vector<Band>& bands,
                       const std::string& x_label, const std::string& y_label) {
  Axis x{1e300, -1e300, kLeft, kWidth - kRight}, y{1e300, -1e300, kHeight - kBottom, kTop, true};
  for (const Series& s : series) {
    for (double v : s.x) x.low = std::min(x.low, v), x.high = std::max(x.high, v);
    for (double v : s.y) {
      if (v > 0) y.low = std::min(y.low, v), y.high = std::max(y.high, v);
    }
  }
  for (const Band& b : bands) x.low = std::min(x.low, b.from), x.high = std::max(x.high, b.to);
  if (!(x.low < x.high)) x.low = 0, x.high = 1;
  if (!(y.low <= y.high) || !std::isfinite(y.high)) y.low = 1, y.high = 2;
  const double x_step = nice_step(x.high - x.low, 8);
  const std::vector<double> y_ticks = log_ticks(y.low, y.high);
  y.low = y_ticks.front();
  y.high = y_ticks.back();

  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth, kHeight);
  for (std::size_t i = 0; i < bands.size(); ++i) {
    const double left = x.at(bands[i].from), right = x.at(bands[i].to);
    out +=
        fmt::format("<rect class=\"band{}\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"/>",
                    i % 2, left, kTop, right - left, kHeight - kBottom - kTop);
    out += text_at((left + right) / 2, kTop - 8, "middle", bands[i].name);
  }
  for (double v : y_ticks) {
    out += fmt::format("<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>",
                       kLeft, kWidth - kRight, y.at(v), y.at(v));
    out += text_at(kLeft - 8, y.at(v) + 4, "end", fmt::format("{:.4g}", v));
  }
  for (auto n = static_cast<std::int64_t>(std::ceil(x.low / x_step));
       static_cast<double>(n) * x_step <= x.high; ++n) {
    const double v = static_cast<double>(n) * x_step;
    out += text_at(x.at(v), kHeight - kBottom + 18, "middle", fmt::format("{:.4g}", v));
  }
  out += text_at((kLeft + kWidth - kRight) / 2, kHeight - 4, "middle", x_label);
  out += fmt::format(
      "<text transform=\"translate(13 {}) rotate(-90)\" text-anchor=\"middle\">{}"
      "</text>",
      (kTop + kHeight - kBottom) / 2, html_escape(y_label));
  double legend = kTop + 18;
  for (const Series& s : series) {
    if (!s.x.empty()) out += draw(s, x, y);
    if (s.name.empty()) continue;
    out += fmt::format("<circle class=\"{} key\" cx=\"{}\" cy=\"{}\" r=\"4\"/>", s.css_class,
                       kWidth - kRight - 12, legend - 4);
    out += text_at(kWidth - kRight - 22, legend, "end", s.name);
    legend += 18;
  }
  return out + "</svg>";
}

std::string bar_chart(const std::vector<Bar>& bars) {
  constexpr double kBar = 22, kGap = 10, kLabel = 90, kValue = 60;
  const double height = static_cast<double>(bars.size()) * (kBar + kGap) + kGap;
  const double span = kWidth - kLabel - kValue;
  std::string out = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\">", kWidth, height);
  double top = kGap;
  for (const Bar& bar : bars) {
    out += text_at(kLabel - 10, top + kBar / 2 + 4, "end", bar.name);
    out += fmt::format(
        "<rect class=\"trough\" x=\"{0}\" y=\"{1}\" width=\"{2}\" height=\"{3}\" rx=\"4\"/>"
        "<rect class=\"bar\" x=\"{0}\" y=\"{1}\" width=\"{4:.1f}\" height=\"{3}\" rx=\"4\"/>",
        kLabel, top, span, kBar, span * bar.value);
    out += text_at(kLabel + span + 10, top + kBar / 2 + 4, "start",
                   fmt::format("{:.1f} %", 100 * bar.value));
    top += kBar + kGap;
  }
  return out + "</svg>";
}

std::string cell_picture(const std::vector<std::vector<int>>& rows, std::span<const int> widths,
                         int columns) {
  constexpr int kCell = 4;  // height of a row, in columns
  std::string out = fmt::format(
      "<svg class=\"cells\" viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" role=\"img\">",
      columns, static_cast<int>(rows.size()) * kCell);
  std::string visible, set;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const int top = static_cast<int>(r) * kCell;
    visible += fmt::format("M0 {}h{}v{}h-{}z", top, widths[r], kCell, widths[r]);
    for (std::size_t i = 0; i < rows[r].size();) {  // runs of neighbours in one piece
      std::size_t end = i + 1;
      while (end < rows[r].size() && rows[r][end] == rows[r][end - 1] + 1) ++end;
      const auto run = static_cast<int>(end - i);
      set += fmt::format("M{} {}h{}v{}h-{}z", rows[r][i], top, run, kCell - 1, run);
      i = end;
    }
  }
  return out + fmt::format("<path class=\"trough\" d=\"{}\"/><path class=\"set\" d=\"{}\"/></svg>",
                           visible, set);
}

}  // namespace winnow::train
