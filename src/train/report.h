// The result of a demo run as a page (self-contained HTML with inline SVG) and as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "train/evaluate.h"
#include "train/trainer.h"

namespace winnow::train {

// What the last rows of one held-out window select.
struct SelectionPicture {
  std::string text;  // the window's bytes
  std::int64_t first_row = 0;
  std::vector<std::vector<std::vector<int>>> layers;  // [layer][row][key ids, ascending]
};

struct Report {
  TrainConfig config;
  std::int64_t parameters = 0;
  std::vector<nlohmann::json> metrics;  // the lines of metrics.jsonl
  Evaluation dense, sparse;             // of the same weights
  double train_seconds = 0;
  double tokens_per_second = 0;  // all training tokens / train_seconds
  std::string prompt, generated_text;
  SelectionPicture picture;
};

// Of the last `rows` rows of held-out window `window`.
SelectionPicture picture_selection(model::Transformer& model, const TextData& data,
                                   std::int64_t window, std::int64_t rows);

double mean(const std::vector<double>& values);  // 0 of none

std::string summary_table(const Report& report);  // for the terminal
nlohmann::ordered_json summary_json(const Report& report);
std::string report_html(const Report& report);

}  // namespace winnow::train
