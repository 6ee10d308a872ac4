#include "train/evaluate.h"

#include <algorithm>
#include <numbers>
#include <span>

#include "base/parallel.h"
#include "comm/collectives.h"
#include "model/cut_batch.h"

namespace winnow::train {
namespace {

constexpr std::int64_t kWindowsAtOnce = 2;

std::int64_t visible(const RowRanges& ranges, std::int64_t row) {
  const auto i = static_cast<std::size_t>(row);
  return ranges.ends[i] - ranges.starts[i];
}

// Selected / visible keys of a row.
double share_read(const Tensor& selection, const RowRanges& ranges, std::int64_t row) {
  const auto i = static_cast<std::size_t>(row);
  const std::int32_t* ids = selection.as<std::int32_t>() + row * selection.strides[0];
  std::int64_t read = 0;
  for (std::int64_t j = 0; j < selection.shape[1]; ++j) {
    read += ids[j] >= ranges.starts[i] && ids[j] < ranges.ends[i] ? 1 : 0;
  }
  return static_cast<double>(read) / static_cast<double>(visible(ranges, row));
}

// Whether a document ends with this row.
bool ends_document(const RowRanges& ranges, std::int64_t row) {
  return row + 1 == ranges.rows() || visible(ranges, row + 1) <= 1;
}

// What the mean of the mass that a selection catches is over.
std::int64_t rows_above(std::int64_t width, const RowRanges& ranges) {
  std::int64_t rows = 0;
  for (std::int64_t row = 0; row < ranges.rows(); ++row)
    rows += visible(ranges, row) > width ? 1 : 0;
  return rows;
}

// What one unit of windows adds to an evaluation; of fixed size, so that every rank can hold the
// units of all.
struct Columns {
  std::size_t depths, masses;
  std::size_t nll() const { return 0; }
  std::size_t tokens() const { return 1; }
  std::size_t keys_read_mean() const { return 2; }
  std::size_t keys_read_last() const { return 3; }
  std::size_t rows() const { return 4; }   // that selected, over all layers
  std::size_t lasts() const { return 5; }  // of them the last of their documents
  std::size_t above() const { return 6; }  // rows with more keys than a selection
  std::size_t mtp_nll() const { return 7; }
  std::size_t mtp_tokens() const { return mtp_nll() + depths; }
  std::size_t mass() const { return mtp_tokens() + depths; }
  std::size_t count() const { return mass() + masses; }
};

void add_keys_read(const model::Transformer& model, const RowRanges& ranges, const Columns& columns,
                   std::span<double> sums) {
  for (const Tensor& selection : model.selections()) {
    for (std::int64_t row = 0; row < ranges.rows(); ++row) {
      if (visible(ranges, row) == 0) continue;
      const double share = share_read(selection, ranges, row);
      sums[columns.keys_read_mean()] += share;
      sums[columns.rows()] += 1;
      if (!ends_document(ranges, row)) continue;
      sums[columns.keys_read_last()] += share;
      sums[columns.lasts()] += 1;
    }
  }
}

// Of a unit, what this rank's rows add.
void add_unit(model::Transformer& model, model::Batch batch, const model::StepOptions& options,
              const Ranks& ranks, const Columns& columns, std::span<double> sums) {
  add_mtp_tokens(batch, static_cast<std::int64_t>(columns.depths));
  batch = share_batch(std::move(batch), ranks.context());
  const model::StepResult result = model.step(batch, options);
  sums[columns.nll()] = result.nll;
  sums[columns.tokens()] = static_cast<double>(result.tokens);
  for (std::size_t d = 0; d < result.mtp_nll.size(); ++d) {
    sums[columns.mtp_nll() + d] = result.mtp_nll[d];
    sums[columns.mtp_tokens() + d] = static_cast<double>(result.mtp_tokens[d]);
  }
  const auto above = static_cast<double>(
      rows_above(model.config().attention.indexer.selection_width(), batch.ranges));
  sums[columns.above()] = above;
  for (std::size_t i = 0; i < result.attention_mass_caught.size(); ++i) {
    sums[columns.mass() + i] = result.attention_mass_caught[i] * above;
  }
  const bool whole = ranks.context().size() == 1;  // rows stand beside those of their document
  if (options.mode == attention::AttentionMode::kSparse && whole) {
    add_keys_read(model, batch.ranges, columns, sums);
  }
}

}  // namespace

// Context groups take units in turn; what they find is added up unit by unit, whoever read it.
Evaluation evaluate(model::Transformer& model, const TextData& data, attention::AttentionMode mode,
                    std::int64_t windows, bool measure_selection, const Ranks& ranks) {
  Evaluation e;
  e.windows = std::min(windows, data.validation_windows());
  const model::ModelConfig& config = model.config();
  const auto depths = static_cast<std::size_t>(config.mtp_depths);
  const std::size_t measured =
      measure_selection ? static_cast<std::size_t>(config.layers) + depths : 0;
  const Columns columns{depths, measured};
  model::StepOptions options;
  options.mode = mode;
  options.backward = false;
  options.measure_selection = measure_selection;
  options.mtp_loss_scales.assign(depths, 1);

  const std::int64_t units = ceil_div(e.windows, kWindowsAtOnce);
  std::vector<double> table(static_cast<std::size_t>(units) * columns.count());
  const auto unit = [&](std::int64_t u) {
    return std::span(table).subspan(static_cast<std::size_t>(u) * columns.count(), columns.count());
  };
  for (std::int64_t u = ranks.share(); u < units; u += ranks.shares()) {
    const std::int64_t first = u * kWindowsAtOnce;
    const std::int64_t count = std::min(kWindowsAtOnce, e.windows - first);
    add_unit(model, data.validation_batch(first, count), options, ranks, columns, unit(u));
  }
  comm::sum(ranks.world(), std::span<double>(table));
  std::vector<double> sums(columns.count());
  for (std::int64_t u = 0; u < units; ++u) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += unit(u)[i];
  }

  e.bits_per_byte = sums[columns.nll()] / sums[columns.tokens()] / std::numbers::ln2;
  for (std::size_t d = 0; d < depths; ++d) {
    const double tokens = std::max(1.0, sums[columns.mtp_tokens() + d]);
    e.mtp_bits_per_byte.push_back(sums[columns.mtp_nll() + d] / (tokens * std::numbers::ln2));
  }
  const double above = sums[columns.above()];
  for (std::size_t i = 0; i < measured; ++i) {
    e.attention_mass_caught.push_back(above == 0 ? 1 : sums[columns.mass() + i] / above);
  }
  if (sums[columns.rows()] > 0) {
    e.keys_read_mean = sums[columns.keys_read_mean()] / sums[columns.rows()];
    e.keys_read_fraction = sums[columns.keys_read_last()] / sums[columns.lasts()];
  }
  return e;
}

}  // namespace winnow::train
