#include "bench/attention.h"

#include <algorithm>
#include <cmath>

#include "bench/bounds.h"
#include "bench/data.h"
#include "ref/attention.h"
#include "ref/key_place.h"

namespace winnow::bench {

std::vector<Parameter> attention_parameters() {
  return {{"rows", "64", "query rows"},
          {"keys", "4096", "keys of the key space"},
          {"heads", "64", "query heads"},
          {"kv_heads", "1", "key heads", kPositive},
          {"dim_qk", "576", "channels of query and key"},
          {"dim_v", "512", "channels of value and output"},
          {"value", "0", "1: a value of its own; 0: the first channels of the key", kFlag},
          {"topk", "2048", "slots of a list; 0: no lists, every key of the range"},
          {"ids", "ascending", "", kIds},
          {"lengths", "0", "1: rows end at topk_lengths of every kind", kFlag},
          {"range", "full", "", kRanges},
          {"dtype", "f32", "", kFloats},
          {"wide", "0", "1: f32 outputs also for 16-bit inputs", kFlag},
          {"spread", "1", "typical size of a logit"},
          {"seed", "1", "of the data"}};
}

AttentionInputs::AttentionInputs(const Problem& p, std::int64_t page)
    : rows(p.number("rows")),
      keys(p.number("keys")),
      heads(p.number("heads")),
      kv_heads(p.number("kv_heads")),
      dim_qk(p.number("dim_qk")),
      dim_v(p.number("dim_v")),
      topk(p.number("topk")),
      shared_value(!p.flag("value")),
      with_lengths(p.flag("lengths")),
      dtype(p.dtype()),
      softmax_scale(static_cast<double>(p.number("spread")) /
                    std::sqrt(static_cast<double>(dim_qk))) {
  Random random(static_cast<std::uint64_t>(p.number("seed")));
  query = Guarded(dtype, {rows, heads, dim_qk});
  starts = Guarded(DType::kI32, {rows});
  ends = Guarded(DType::kI32, {rows});
  fill_gauss(query, random);
  key = Keys(dtype, rows, keys, {kv_heads, dim_qk}, page, random);
  keys = key.count();
  fill_ranges(p.word("range"), keys, topk > 0 ? topk : 16, starts, ends, random);
  if (!shared_value) {
    const Tensor& k = key.data();
    value = page > 0 ? Guarded(dtype, {k.shape[0], k.shape[1], kv_heads, dim_v})
                     : Guarded(dtype, {keys, kv_heads, dim_v});
    fill_gauss(value, random);
  }
  if (topk > 0) {
    topk_indices = Guarded(DType::kI32, {rows, topk});
    fill_indices(p.word("ids"), keys, starts, ends, topk_indices, random);
  }
  if (with_lengths) {
    topk_lengths = Guarded(DType::kI32, {rows});
    for (std::int64_t i = 0; i < rows && !ShapesOnly::on(); ++i) {
      const std::int64_t lengths[] = {topk, 0, -3, 1, topk + 5, random.below(topk + 1)};
      topk_lengths.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(lengths[i % 6]);
    }
  }
}

std::vector<std::int64_t> AttentionInputs::slots(std::int64_t row) const {
  std::vector<std::int64_t> ids;
  ref::for_each_slot(indices_or_nothing(), lengths_or_nothing(), row_range(starts, ends, row, keys),
                     row, [&](std::int64_t, std::int64_t id) {
                       if (!ref::place_of(key.view(), row, id).missing()) ids.push_back(id);
                     });
  return ids;
}

double AttentionInputs::key_at(std::int64_t row, std::int64_t id, std::int64_t g,
                               std::int64_t d) const {
  const ref::KeyPlace at = ref::place_of(key.view(), row, id);
  return ref::get(at.keys, at.index, g, d);
}
double AttentionInputs::value_at(std::int64_t row, std::int64_t id, std::int64_t g,
                                 std::int64_t c) const {
  const ref::KeyPlace at = ref::place_of(key.view(), value_source(), row, id);
  return ref::get(at.keys, at.index, g, c);
}

double AttentionInputs::pairs() const {
  double sum = 0;
  for (std::int64_t i = 0; i < rows; ++i) sum += static_cast<double>(slots(i).size());
  return sum;
}

double AttentionInputs::input_elements() const {
  return static_cast<double>(query.view().elements() + key.data().elements() +
                             value.view().elements());
}

double storage_error(DType dtype, double magnitude) {
  if (dtype == DType::kBF16) return std::max(0x1p-8 * magnitude, 0x1p-134);
  return dtype == DType::kF16 ? std::max(0x1p-11 * magnitude, 0x1p-25) : 0;
}

// z = scale (q . k): dim_qk products and additions, the rounding of the scale and its product:
// every term passes at most dim_qk + 3 roundings.
HeadLogits head_logits(const AttentionInputs& in, std::int64_t row, std::int64_t head,
                       const std::vector<std::int64_t>& slots) {
  HeadLogits out;
  const double relative = product_gamma(in.dtype, static_cast<double>(in.dim_qk + 3));
  double maximum = -INFINITY, sum = 0;
  for (const std::int64_t id : slots) {
    double dot = 0, magnitude = 0;
    for (std::int64_t d = 0; d < in.dim_qk; ++d) {
      const double term =
          ref::get(in.query, row, head, d) * in.key_at(row, id, head / in.group(), d);
      dot += term;
      magnitude += std::abs(term);
    }
    out.z.push_back(in.softmax_scale * dot);
    out.error.push_back(relative * in.softmax_scale * magnitude);
    maximum = std::max(maximum, out.z.back());
  }
  for (const double z : out.z) sum += std::exp(z - maximum);
  out.lse = slots.empty() ? -INFINITY : maximum + std::log(sum);
  return out;
}

}  // namespace winnow::bench
