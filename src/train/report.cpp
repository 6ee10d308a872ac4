#include "train/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "train/progress.h"
#include "train/svg.h"

namespace winnow::train {
namespace {

using nlohmann::json;

constexpr const char* kStyle = R"(
:root { --page: #fbfaf7; --ink: #22242a; --soft: #6b6f78; --line: #dcd9d0; --card: #ffffff;
  --a: #b4532a; --b: #2a6f97; --c: #6a8d3a; --d: #8a5a9e; --band0: #f3f0e8; --band1: #e9eef0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e6e4de; --soft: #9a9da5; --line: #363a42; --card: #1d2026;
    --a: #ee9a6a; --b: #7cc0e4; --c: #a9cc74; --d: #c9a0dc; --band0: #22252b; --band1: #1b2a31; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 860px; padding: 48px 24px 80px; background: var(--page);
  color: var(--ink); font: 17px/1.6 Georgia, "Iowan Old Style", "Times New Roman", serif; }
h1 { font-size: 34px; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 22px; margin: 48px 0 8px; }
h3 { font: 600 14px system-ui, sans-serif; margin: 20px 0 4px; color: var(--soft); }
p { margin: 8px 0 16px; } .lead { color: var(--soft); font-size: 19px; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif;
  fill: var(--soft); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 16px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; }
.tiles .card { margin: 0; } .tiles b { display: block; font: 600 28px/1.2 system-ui, sans-serif; }
.tiles span { font: 14px/1.4 system-ui, sans-serif; color: var(--soft); }
table { border-collapse: collapse; font: 14px system-ui, sans-serif; width: 100%; }
td { padding: 5px 0; border-bottom: 1px solid var(--line); } td:last-child { text-align: right;
  font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; } .band0 { fill: var(--band0); }
.band1 { fill: var(--band1); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
polyline.faint { stroke: var(--a); stroke-width: 1; opacity: 0.28; }
polyline.a { stroke: var(--a); } polyline.b { stroke: var(--b); } polyline.c { stroke: var(--c); }
polyline.d { stroke: var(--d); } circle.a { fill: var(--a); } circle.b { fill: var(--b); }
circle.c { fill: var(--c); } circle.d { fill: var(--d); }
.trough { fill: var(--band1); } .bar { fill: var(--c); } .set { fill: var(--a); }
.cells { height: 128px; border-radius: 4px; }
pre, .window { font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.window i { font-style: normal; border-radius: 2px; }
.prompt { color: var(--soft); }
)";

// Bytes of a model need not be UTF-8: what is not ASCII text becomes a middle dot.
std::string printable(const std::string& bytes) {
  std::string out;
  for (char c : bytes) {
    if ((c >= 0x20 && c < 0x7f) || c == '\n') {
      out += c;
    } else {
      out += "\xc2\xb7";
    }
  }
  return out;
}

std::vector<double> smoothed(const std::vector<double>& values) {
  const auto n = static_cast<std::ptrdiff_t>(values.size());
  const std::ptrdiff_t reach = std::max<std::ptrdiff_t>(1, n / 60);
  std::vector<double> out;
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    const std::ptrdiff_t first = std::max<std::ptrdiff_t>(0, i - reach);
    const std::ptrdiff_t last = std::min(n - 1, i + reach);
    double sum = 0;
    for (std::ptrdiff_t j = first; j <= last; ++j) sum += values[static_cast<std::size_t>(j)];
    out.push_back(sum / static_cast<double>(last - first + 1));
  }
  return out;
}

std::vector<Band> bands_of(const TrainConfig& config) {
  std::vector<Band> bands;
  double from = 0;
  for (const StageConfig& stage : config.stages) {
    bands.push_back({from, from + static_cast<double>(stage.steps), stage.name});
    from = bands.back().to;
  }
  return bands;
}

// The language loss: one line per stage that has one, and the validations as dots.
std::string loss_chart(const Report& report) {
  std::vector<Series> all;
  Series dense{"b", "held-out, dense", {}, {}, true}, sparse{"c", "held-out, sparse", {}, {}, true};
  for (const StageConfig& stage : report.config.stages) {
    Series raw{"faint", "", {}, {}, false};
    for (const json& line : report.metrics) {
      if (line.value("stage", "") != stage.name) continue;
      const double step = line.at("step").get<double>();
      if (line.contains("loss")) {
        raw.x.push_back(step);
        raw.y.push_back(line["loss"].get<double>() / std::numbers::ln2);
      } else if (line.contains("validation")) {
        const json& validation = line["validation"];
        Series& dots = validation.value("attention", "") == "dense" ? dense : sparse;
        dots.x.push_back(step);
        dots.y.push_back(validation.at("bits_per_byte").get<double>());
      }
    }
    if (raw.x.empty()) continue;
    all.push_back(raw);
    all.push_back({"a", all.size() == 1 ? "training" : "", raw.x, smoothed(raw.y), false});
  }
  for (const Series& dots : {dense, sparse}) {
    if (!dots.x.empty()) all.push_back(dots);
  }
  return line_chart(all, bands_of(report.config), "step", "bits per byte");
}

// Depths of multi-token prediction follow the layers.
std::string layer_name(const Report& report, std::size_t n) {
  const auto layers = static_cast<std::size_t>(report.config.model.layers);
  return n < layers ? fmt::format("layer {}", n) : fmt::format("MTP depth {}", n - layers);
}

std::string index_chart(const Report& report) {
  std::vector<Series> all;
  const char* classes[] = {"a", "b", "c", "d"};
  for (const json& line : report.metrics) {
    if (!line.contains("index_kl")) continue;
    const json& kl = line["index_kl"];
    while (all.size() < kl.size()) {
      all.push_back({classes[all.size() % 4], layer_name(report, all.size()), {}, {}, false});
    }
    for (std::size_t i = 0; i < kl.size(); ++i) {
      if (kl[i].is_null()) continue;  // the layer reuses indices
      all[i].x.push_back(line.at("step").get<double>());
      all[i].y.push_back(kl[i].get<double>());
    }
  }
  std::erase_if(all, [](const Series& s) { return s.x.empty(); });
  for (Series& s : all) s.y = smoothed(s.y);
  return line_chart(all, bands_of(report.config), "step", "KL, nats per row");
}

// One line per layer of a list that the health of a step holds; "" without any.
std::string health_chart(const Report& report, const char* list, const char* label) {
  std::vector<Series> all;
  const char* classes[] = {"a", "b", "c", "d"};
  constexpr double kLeast = 1e-3;  // the axis is logarithmic
  for (const json& line : report.metrics) {
    if (!line.contains("health") || !line["health"].contains(list)) continue;
    const json& values = line["health"][list];
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (all.size() == i) all.push_back({classes[i % 4], layer_name(report, i), {}, {}, false});
      if (values[i].is_null()) continue;
      all[i].x.push_back(line.at("step").get<double>());
      all[i].y.push_back(std::max(kLeast, values[i].get<double>()));
    }
  }
  std::erase_if(all, [](const Series& s) { return s.x.empty(); });
  return all.empty() ? "" : line_chart(all, bands_of(report.config), "step", label);
}

std::string health_section(const Report& report) {
  const std::string caught = health_chart(report, "attention_mass_caught", "share caught"),
                    kept = health_chart(report, "selection_overlap", "share kept");
  if (caught.empty()) return "";
  std::string out =
      "<h2>The indexers while they trained</h2><p>On one held-out window: the share of the dense "
      "attention's probability on the selected keys, by layer";
  if (!kept.empty()) {
    out += fmt::format("; and the share of the selection that was selected {} steps before, too",
                       report.config.health_every);
  }
  out += ".</p><div class=\"card\">" + caught + "</div>";
  return kept.empty() ? out : out + "<div class=\"card\">" + kept + "</div>";
}

std::string layers_chart(const Report& report) {
  std::vector<Bar> bars;
  for (double mass : report.sparse.attention_mass_caught) {
    bars.push_back({layer_name(report, bars.size()), mass});
  }
  return bar_chart(bars);
}

std::string picture_section(const SelectionPicture& picture) {
  std::string out;
  const auto columns = static_cast<int>(picture.text.size());
  for (std::size_t layer = 0; layer < picture.layers.size(); ++layer) {
    std::vector<int> widths;
    for (std::size_t r = 0; r < picture.layers[layer].size(); ++r) {
      widths.push_back(static_cast<int>(picture.first_row) + static_cast<int>(r) + 1);
    }
    out += fmt::format("<h3>layer {}</h3>{}", layer,
                       cell_picture(picture.layers[layer], widths, columns));
  }
  return out;
}

// The window's text; a byte is the stronger marked the more layers' last row selects it.
std::string window_text(const SelectionPicture& picture) {
  std::vector<int> layers_reading(picture.text.size());
  for (const auto& layer : picture.layers) {
    if (layer.empty()) continue;
    for (int id : layer.back()) ++layers_reading[static_cast<std::size_t>(id)];
  }
  std::string out;
  for (std::size_t i = 0; i < picture.text.size();) {
    std::size_t end = i + 1;
    while (end < picture.text.size() && layers_reading[end] == layers_reading[i]) ++end;
    const std::string part = html_escape(printable(picture.text.substr(i, end - i)));
    const int percent =
        75 * layers_reading[i] / std::max<int>(1, static_cast<int>(picture.layers.size()));
    out += percent == 0 ? part
                        : fmt::format(
                              "<i style=\"background:color-mix(in srgb,var(--a) {}%,transparent)\">"
                              "{}</i>",
                              percent, part);
    i = end;
  }
  return out;
}

std::string tile(const std::string& number, const std::string& meaning) {
  return fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>", number, meaning);
}

std::string row(const std::string& name, const std::string& value) {
  return fmt::format("<tr><td>{}</td><td>{}</td></tr>", html_escape(name), html_escape(value));
}

std::string configuration_table(const Report& report) {
  const model::ModelConfig& m = report.config.model;
  const attention::IndexerConfig& i = m.attention.indexer;
  std::string out = "<table>";
  out += row("parameters", fmt::format("{}", report.parameters));
  out += row("layers x hidden size x heads",
             fmt::format("{} x {} x {}", m.layers, m.attention.hidden_size, m.attention.heads));
  out += row("indexer heads x dim, keys kept",
             fmt::format("{} x {}, {}{}", i.index_heads, i.index_dim, i.topk,
                         i.pools() ? fmt::format(" in pools of {}", i.pool_size) : ""));
  out += row("context, bytes", fmt::format("{}", report.config.data.context));
  for (const StageConfig& stage : report.config.stages) {
    out += row(fmt::format("stage \"{}\" ({})", stage.name, attention_mode_name(stage.attention)),
               fmt::format("{} steps of {} bytes, learning rate {} to {}", stage.steps,
                           report.config.data.batch_sequences * report.config.data.context,
                           stage.learning_rate, stage.final_learning_rate));
  }
  out += row("training", fmt::format("{} ({:.0f} bytes/s)", duration_text(report.train_seconds),
                                     report.tokens_per_second));
  out += row("held-out text", fmt::format("{} windows of {} bytes", report.dense.windows,
                                          report.config.data.context));
  return out + "</table>";
}

}  // namespace

SelectionPicture picture_selection(model::Transformer& model, const TextData& data,
                                   std::int64_t window, std::int64_t rows) {
  const model::Batch batch = data.validation_batch(window, 1);
  model::StepOptions options;
  options.mode = attention::AttentionMode::kSparse;
  options.backward = false;
  model.step(batch, options);
  SelectionPicture picture;
  std::int64_t end = 0;  // of the first document; without documents of the window
  while (end < batch.cu_seqlens[1] && batch.targets[static_cast<std::size_t>(end)] >= 0) {
    picture.text += static_cast<char>(batch.tokens[static_cast<std::size_t>(end++)]);
  }
  picture.first_row = std::max<std::int64_t>(0, end - rows);
  for (const Tensor& selection : model.selections()) {
    std::vector<std::vector<int>> layer;
    for (std::int64_t r = picture.first_row; r < end; ++r) {
      const std::int32_t* ids = selection.as<std::int32_t>() + r * selection.strides[0];
      std::vector<int> selected;
      for (std::int64_t j = 0; j < selection.shape[1]; ++j) {
        if (ids[j] >= 0) selected.push_back(ids[j]);
      }
      layer.push_back(std::move(selected));
    }
    picture.layers.push_back(std::move(layer));
  }
  return picture;
}

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (double v : values) sum += v;
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

std::string summary_table(const Report& report) {
  const auto line = [](const char* name, const std::string& value) {
    return fmt::format("  {:<44}{:>10}\n", name, value);
  };
  std::string out;
  out += line("held-out bits per byte, dense attention",
              fmt::format("{:.4f}", report.dense.bits_per_byte));
  out += line("held-out bits per byte, sparse attention",
              fmt::format("{:.4f}", report.sparse.bits_per_byte));
  out += line("keys read, last row of a window",
              fmt::format("{:.1f} %", 100 * report.sparse.keys_read_fraction));
  out += line("keys read, mean over all rows",
              fmt::format("{:.1f} %", 100 * report.sparse.keys_read_mean));
  out += line("dense attention mass on the selected keys",
              fmt::format("{:.1f} %", 100 * mean(report.sparse.attention_mass_caught)));
  out += line("training, tokens per second", fmt::format("{:.0f}", report.tokens_per_second));
  out += line("training, minutes", duration_text(report.train_seconds));
  return out;
}

nlohmann::ordered_json summary_json(const Report& report) {
  return {{"dense_bits_per_byte", report.dense.bits_per_byte},
          {"sparse_bits_per_byte", report.sparse.bits_per_byte},
          {"keys_read_fraction", report.sparse.keys_read_fraction},
          {"keys_read_mean", report.sparse.keys_read_mean},
          {"attention_mass_caught", mean(report.sparse.attention_mass_caught)},
          {"attention_mass_caught_by_layer", report.sparse.attention_mass_caught},
          {"train_seconds", report.train_seconds},
          {"tokens_per_second", report.tokens_per_second},
          {"parameters", report.parameters},
          {"validation_windows", report.dense.windows},
          {"context", report.config.data.context},
          {"topk", report.config.model.attention.indexer.topk},
          {"prompt", printable(report.prompt)},
          {"generated_text", printable(report.generated_text)}};
}

std::string report_html(const Report& report) {
  const std::int64_t context = report.config.data.context;
  const std::int64_t topk = report.config.model.attention.indexer.topk;
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
      "<title>winnow: a small model with sparse attention</title><style>";
  out += kStyle;
  out += "</style></head>\n<body><h1>Keeping the grain</h1>";
  out += fmt::format(
      "<p class=\"lead\">A byte-level language model of {:.2f} million parameters, trained with "
      "DeepSeek Sparse Attention. At the end of a window of {} bytes its attention reads {} of "
      "them, chosen by a small indexer.</p>",
      static_cast<double>(report.parameters) / 1e6, context, topk);
  out += "<div class=\"tiles\">";
  out += tile(fmt::format("{:.3f}", report.dense.bits_per_byte),
              "bits per byte, dense attention, on held-out text");
  out += tile(fmt::format("{:.3f}", report.sparse.bits_per_byte),
              "bits per byte, sparse attention, same weights, same text");
  out += tile(fmt::format("{:.1f} %", 100 * report.sparse.keys_read_fraction),
              "of the keys are read at the last row of a window");
  out += tile(fmt::format("{:.1f} %", 100 * mean(report.sparse.attention_mass_caught)),
              "of the dense attention's mass lies on the selected keys");
  out +=
      "</div>\n<h2>Loss through the stages</h2><p>First the model learns with dense attention. "
      "Then it stands still while the indexers learn where its attention goes. Then both train "
      "on, and attention reads only what the indexers select.</p><div class=\"card\">";
  out += loss_chart(report);
  out +=
      "</div>\n<h2>How far the indexers are from the attention</h2><p>The divergence between "
      "where attention looks and where the indexer points: over all visible keys in the "
      "warm-up, over the selected ones after it.</p><div class=\"card\">";
  out += index_chart(report) + "</div>\n" + health_section(report);
  out += fmt::format(
      "<h2>What the selection catches, by layer</h2><p>The share of the dense attention's "
      "probability that falls on the {} selected keys; mean over rows that see more keys than "
      "that.</p><div class=\"card\">",
      topk);
  out += layers_chart(report);
  out += fmt::format(
      "</div>\n<h2>Which keys the last rows select</h2><p>Each line is one of the last {} rows of "
      "a held-out window, from left to right its {} bytes; marked are the keys that the row "
      "reads.</p><div class=\"card\">",
      report.picture.layers.empty() ? 0 : report.picture.layers[0].size(), context);
  out += picture_section(report.picture);
  out +=
      "</div>\n<h2>What the last byte reads</h2><p>The same window as text. The more layers read "
      "a byte when the next one after the window is predicted, the stronger it is marked.</p>"
      "<div class=\"card window\">";
  out += window_text(report.picture);
  out += "</div>\n<h2>Text that it wrote</h2><div class=\"card\"><pre><span class=\"prompt\">";
  out += html_escape(printable(report.prompt)) + "</span>" +
         html_escape(printable(report.generated_text));
  out += "</pre></div>\n<h2>The run</h2><div class=\"card\">";
  out += configuration_table(report);
  return out + "</div></body></html>\n";
}

}  // namespace winnow::train
