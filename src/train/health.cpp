#include "train/health.h"

#include <algorithm>

#include "base/check.h"
#include "model/cut_batch.h"

namespace winnow::train {
namespace {

constexpr const char* kOperation = "health";

// Keys that two ascending lists of ids share; -1 ends a list.
std::int64_t common(const std::int32_t* a, const std::int32_t* b, std::int64_t width) {
  std::int64_t count = 0;
  for (std::int64_t i = 0, j = 0; i < width && j < width && a[i] >= 0 && b[j] >= 0;) {
    count += a[i] == b[j] ? 1 : 0;
    const bool first = a[i] <= b[j], second = b[j] <= a[i];
    i += first ? 1 : 0;
    j += second ? 1 : 0;
  }
  return count;
}

double overlap(const Tensor& now, const Tensor& before, const RowRanges& ranges) {
  const std::int64_t width = now.shape[1];
  std::int64_t kept = 0, selected = 0;
  for (std::int64_t row = 0; row < now.shape[0]; ++row) {
    const auto i = static_cast<std::size_t>(row);
    if (ranges.ends[i] - ranges.starts[i] <= width) continue;
    const std::int32_t* ids = now.as<std::int32_t>() + row * width;
    kept += common(ids, before.as<std::int32_t>() + row * width, width);
    selected += common(ids, ids, width);
  }
  return selected == 0 ? 1 : static_cast<double>(kept) / static_cast<double>(selected);
}

std::string name_of(std::size_t n) { return fmt::format("selection.{}", n); }

// The layers of the model that own an indexer, without that of multi-token prediction.
std::vector<std::size_t> owners(const model::ModelConfig& config) {
  std::vector<std::size_t> all;
  for (const std::int64_t n : model::index_layers(config)) {
    if (n < config.layers) all.push_back(static_cast<std::size_t>(n));
  }
  return all;
}

}  // namespace

Health IndexHealth::measure(model::Transformer& model, const TextData& data, const Ranks& ranks) {
  const model::Batch window = data.validation_batch(0, 1),
                     mine = share_batch(window, ranks.context());
  model::StepOptions options;
  options.mode = attention::AttentionMode::kSparse;
  options.backward = false;
  options.measure_selection = true;
  Health health;
  health.attention_mass_caught = model.step(mine, options).attention_mass_caught;
  const std::vector<Tensor> selections = model.selections();
  std::vector<Array> now;
  for (const std::size_t n : owners(model.config())) {
    now.push_back(gather_selection(window, mine, selections[n]));
  }
  for (std::size_t i = 0; i < last_.size(); ++i) {
    health.selection_overlap.push_back(overlap(now[i], last_[i], window.ranges));
  }
  last_ = std::move(now);
  return health;
}

std::vector<model::NamedTensor> IndexHealth::state() const {
  std::vector<model::NamedTensor> all;
  for (std::size_t n = 0; n < last_.size(); ++n) all.push_back({name_of(n), last_[n]});
  return all;
}

void IndexHealth::restore(const std::filesystem::path& path, const model::ModelConfig& config) {
  const model::SafetensorsFile file(path);
  const std::int64_t width = config.attention.indexer.selection_width();
  std::vector<Array> all;
  for (std::size_t n = 0; n < owners(config).size(); ++n) {
    all.push_back(file.read(name_of(n)));
    const Tensor& ids = all.back();
    const bool fits = ids.dtype == DType::kI32 && ids.rank == 2 &&
                      ids.shape == all[0].view().shape && ids.shape[1] == width;
    if (!fits) {
      fail(Status::kCorrupt, kOperation, "{}: {} must be i32 [rows, {}] as the others, got {}",
           path.string(), name_of(n), width, shape_text(ids));
    }
  }
  last_ = std::move(all);
}

}  // namespace winnow::train
