#include "train/evaluate.h"

#include <algorithm>
#include <numbers>

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
std::int64_t rows_above(std::int64_t topk, const RowRanges& ranges) {
  std::int64_t rows = 0;
  for (std::int64_t row = 0; row < ranges.rows(); ++row)
    rows += visible(ranges, row) > topk ? 1 : 0;
  return rows;
}

}  // namespace

Evaluation evaluate(model::Transformer& model, const TextData& data, attention::AttentionMode mode,
                    std::int64_t windows, bool measure_selection) {
  Evaluation sum;
  sum.windows = std::min(windows, data.validation_windows());
  double nll = 0;
  std::vector<std::int64_t> mtp_tokens;
  std::int64_t tokens = 0, selections = 0, rows = 0, measured = 0;
  for (std::int64_t first = 0; first < sum.windows; first += kWindowsAtOnce) {
    const std::int64_t count = std::min(kWindowsAtOnce, sum.windows - first);
    model::Batch batch = data.validation_batch(first, count);
    add_mtp_tokens(batch, model.config().mtp_depths);
    model::StepOptions options;
    options.mode = mode;
    options.backward = false;
    options.measure_selection = measure_selection;
    options.mtp_loss_scales.assign(batch.mtp_tokens.size(), 1);
    const model::StepResult result = model.step(batch, options);
    nll += result.nll;
    tokens += result.tokens;
    sum.mtp_bits_per_byte.resize(result.mtp_nll.size());
    mtp_tokens.resize(result.mtp_nll.size());
    for (std::size_t d = 0; d < mtp_tokens.size(); ++d) {
      sum.mtp_bits_per_byte[d] += result.mtp_nll[d];
      mtp_tokens[d] += result.mtp_tokens[d];
    }
    const std::int64_t above = rows_above(model.config().attention.indexer.topk, batch.ranges);
    measured += above;
    sum.attention_mass_caught.resize(result.attention_mass_caught.size());
    for (std::size_t i = 0; i < result.attention_mass_caught.size(); ++i) {
      sum.attention_mass_caught[i] += result.attention_mass_caught[i] * static_cast<double>(above);
    }
    if (mode != attention::AttentionMode::kSparse) continue;
    for (const Tensor& selection : model.selections()) {
      for (std::int64_t row = 0; row < batch.ranges.rows(); ++row) {
        if (visible(batch.ranges, row) == 0) continue;
        const double share = share_read(selection, batch.ranges, row);
        sum.keys_read_mean += share;
        ++rows;
        if (!ends_document(batch.ranges, row)) continue;
        sum.keys_read_fraction += share;
        ++selections;
      }
    }
  }
  sum.bits_per_byte = nll / static_cast<double>(tokens) / std::numbers::ln2;
  for (std::size_t d = 0; d < mtp_tokens.size(); ++d) {
    sum.mtp_bits_per_byte[d] /=
        static_cast<double>(std::max<std::int64_t>(1, mtp_tokens[d])) * std::numbers::ln2;
  }
  for (double& mass : sum.attention_mass_caught) {
    mass = measured == 0 ? 1 : mass / static_cast<double>(measured);
  }
  if (rows > 0) {
    sum.keys_read_mean /= static_cast<double>(rows);
    sum.keys_read_fraction /= static_cast<double>(selections);
  }
  return sum;
}

}  // namespace winnow::train
