// Golden vectors of kpool/: pooled keys, and the tokens that a KPool indexer selects; [b, s, ...]
// float32, causal, padded on the left where `valid` says so, one file per case.
//
// Each operation gets the golden inputs: pools are selected by golden pooled keys, and expanded from
// golden pools, which the golden tokens tell.
#include <algorithm>
#include <vector>

#include "apps/winnow/golden_comparer.h"
#include "apps/winnow/golden_reader.h"
#include "bench/pooling.h"
#include "winnow/append_pools.h"
#include "winnow/expand_pools.h"
#include "winnow/index_topk.h"
#include "winnow/pool_keys.h"
#include "winnow/pools.h"

namespace winnow::app {
namespace {

using Ids = std::vector<std::int32_t>;

Tensor ids_of(const Ids& ids) { return make_tensor(ids.data(), DType::kI32, {std::ssize(ids)}); }

// A file of kpool/.
class KpoolFile {
 public:
  explicit KpoolFile(const std::filesystem::path& path) : reader_(path) {
    pool_size = reader_.meta_whole("pool");
    topk = reader_.meta_whole("topk");
    always_select_tail = reader_.meta_flag("always_select_tail");
    dot_scale = reader_.meta_real("softmax_scale");
    const Array key = reader_.read("key");
    GoldenReader::rule(key.view().rank == 3, "key must be [b, s, dim]", key);
    GoldenReader::rule(pool_size >= 1 && topk >= pool_size && topk % pool_size == 0,
                       "topk must be a multiple of pool", key);
    batch = key.view().shape[0];
    length = key.view().shape[1];
  }

  // Batch element e of a tensor [b, s, ...], or [b, ...] of pools.
  Array rows(const char* name, std::int64_t e, DType dtype) const {
    return reader_.slice(name, 0, e, {batch, length}, dtype);
  }
  Array pools(const char* name, std::int64_t e, DType dtype) const {
    return reader_.slice(name, 0, e, {batch, length / pool_size}, dtype);
  }
  // The same for every batch element.
  Array ape(DType dtype) const {
    const Array whole = reader_.read("ape");
    const Tensor& t = whole;
    GoldenReader::rule(t.rank == 2 && is_float(t.dtype) && t.shape[0] == pool_size,
                       "ape must be floating, [pool, dim]", t);
    Array out(dtype, {t.shape[0], t.shape[1]});
    for (std::int64_t i = 0; i < t.elements(); ++i)
      store_double(out.view().data, dtype, i, element(t, i));
    return out;
  }

  std::int64_t batch = 0, length = 0, pool_size = 1, topk = 0;
  bool always_select_tail = true;
  double dot_scale = 1;

 private:
  GoldenReader reader_;
};

// One file by one implementation, in one dtype.
class KpoolComparer : private GoldenComparer {
 public:
  KpoolComparer(const KpoolFile& file, DType dtype, std::string implementation)
      : GoldenComparer(dtype, std::move(implementation)), file_(file), ape_(file.ape(dtype)) {}

  std::vector<GoldenResult> run() {
    for (std::int64_t e = 0; e < file_.batch; ++e) {
      const Array valid = file_.rows("valid", e, DType::kU8);
      const std::uint8_t* mask = valid.as<std::uint8_t>();
      layout_ =
          pool_layout(valid_spans({mask, static_cast<std::size_t>(file_.length)}, 1, file_.length),
                      file_.pool_size);
      token_rows_ = causal_ranges(layout_.spans, file_.length);
      pool_rows_ = pool_ranges(layout_, token_rows_);
      key_ = file_.rows("key", e, dtype_);
      gate_ = file_.rows("gate", e, dtype_);
      golden_keys_ = file_.pools("pool_keys", e, DType::kF32);
      golden_ids_ = file_.rows("topk_indices", e, DType::kI32);
      compare_layout(e);
      compare_pool_keys(e, PoolRounding::kOnce);
      compare_pool_keys(e, PoolRounding::kKeyDtype);
      compare_append(e);
      compare_selection(e);
    }
    return results();
  }

 private:
  std::int64_t dim() const { return key_.view().shape[1]; }
  std::int64_t pools() const { return std::ssize(layout_.bases); }

  // Where pools begin, and which of them are whole.
  void compare_layout(std::int64_t e) {
    const Array indices = file_.pools("pool_indices", e, DType::kI32),
                valid = file_.pools("pool_valid", e, DType::kU8);
    GoldenReader::rule(indices.view().rank == 2 && indices.view().shape[1] == file_.pool_size,
                       "pool_indices must be [b, pools, pool]", indices);
    layout_ok_ = true;
    std::string where;
    for (std::int64_t m = 0; m < valid.elements(); ++m) {
      bool ok = (valid.as<std::uint8_t>()[m] != 0) == (m < pools());
      for (std::int64_t t = 0; ok && m < pools() && t < file_.pool_size; ++t) {
        ok = indices.as<std::int32_t>()[m * file_.pool_size + t] ==
             layout_.bases[static_cast<std::size_t>(m)] + t;
      }
      if (!ok && layout_ok_) where = fmt::format("batch {} pool {}", e, m);
      layout_ok_ &= ok;
    }
    layout_where_ = where;
  }

  // The golden number came by f32 arithmetic as well: it lies in the interval that the interval of
  // this computation is compared with. For f64 the golden number's own interval is all there is.
  void compare_keys(std::int64_t e, const char* operation, const char* name, const Tensor& pooled,
                    PoolRounding rounding) {
    bench::Worst* w = worst(operation, name);
    if (w == nullptr) return;
    worst(operation, "pool_indices")->add_exact(layout_ok_, [&] { return layout_where_; });
    const Array key = file_.rows("key", e, DType::kF32), gate = file_.rows("gate", e, DType::kF32),
                ape = file_.ape(DType::kF32);
    std::vector<bench::PooledTerm> terms(static_cast<std::size_t>(file_.pool_size));
    for (std::int64_t m = 0; m < pools(); ++m) {
      for (std::int64_t d = 0; d < dim(); ++d) {
        for (std::int64_t t = 0; t < file_.pool_size; ++t) {
          const std::int64_t at = (layout_.bases[static_cast<std::size_t>(m)] + t) * dim() + d;
          terms[static_cast<std::size_t>(t)] = {element(key, at), element(gate, at),
                                                element(ape, t * dim() + d)};
        }
        const bench::Interval f32 = bench::pooled_interval(terms, DType::kF32, rounding);
        const double bound = (f32.high - f32.low) / 2 * (dtype_ == DType::kF64 ? 1 : 2);
        w->add(element(pooled, m * dim() + d), element(golden_keys_, m * dim() + d), bound,
               [&] { return fmt::format("batch {} pool {} channel {}", e, m, d); });
      }
    }
  }

  void compare_pool_keys(std::int64_t e, PoolRounding rounding) {
    const Array pooled(dtype_, {pools(), dim()});
    call(pool_keys, pool_keys_workspace_bytes,
         PoolKeysArgs{key_, gate_, ape_, ids_of(layout_.bases), rounding, pooled});
    compare_keys(e, "pool_keys",
                 rounding == PoolRounding::kOnce ? "pool_keys" : "pool_keys, rounded as the key",
                 pooled, rounding);
  }

  // The valid tokens once more, three at a time.
  void compare_append(std::int64_t e) {
    const std::int64_t begin = layout_.spans.begins[0], end = layout_.spans.ends[0];
    const Array open_key(dtype_, {1, file_.pool_size - 1, dim()}),
        open_gate(dtype_, {1, file_.pool_size - 1, dim()}), pooled(dtype_, {pools(), dim()});
    for (std::int64_t first = begin; first < end; first += 3) {
      const std::int64_t count = std::min<std::int64_t>(3, end - first);
      Ids slots;
      for (std::int64_t t = first - begin; t < first - begin + count; ++t)
        slots.push_back(static_cast<std::int32_t>(t / file_.pool_size));
      const Ids cuts = {0, static_cast<std::int32_t>(count)};
      const Ids context = {static_cast<std::int32_t>(first - begin)};
      AppendPoolsArgs args;
      args.index_key = key_.view().rows(first, count);
      args.gate = gate_.view().rows(first, count);
      args.ape = ape_;
      args.cu_seqlens = ids_of(cuts);
      args.context = ids_of(context);
      args.pool_slots = ids_of(slots);
      args.open_key = open_key;
      args.open_gate = open_gate;
      args.pooled_key = pooled;
      call(append_pools, append_pools_workspace_bytes, args);
    }
    compare_keys(e, "append_pools", "pool_keys", pooled, PoolRounding::kOnce);
  }

  // The golden tokens of a row, ascending.
  Ids golden_tokens(std::int64_t i) const {
    const std::int64_t width = golden_ids_.view().shape[1];
    const std::int32_t* list = golden_ids_.as<std::int32_t>() + i * width;
    Ids tokens;
    std::copy_if(list, list + width, std::back_inserter(tokens),
                 [](std::int32_t id) { return id >= 0; });
    std::sort(tokens.begin(), tokens.end());
    return tokens;
  }
  // The pools whose last token is among them.
  Ids golden_pools(std::int64_t i) const {
    const Ids tokens = golden_tokens(i);
    Ids found;
    const RowRanges& seen = pool_rows_;
    for (std::int32_t m = seen.starts[static_cast<std::size_t>(i)];
         m < seen.ends[static_cast<std::size_t>(i)]; ++m) {
      const std::int64_t last = layout_.bases[static_cast<std::size_t>(m)] + file_.pool_size - 1;
      if (std::binary_search(tokens.begin(), tokens.end(), static_cast<std::int32_t>(last)))
        found.push_back(m);
    }
    return found;
  }

  void compare_lists(const char* operation, std::int64_t e, const Array& ids, const Array& lengths,
                     Ids (KpoolComparer::*golden)(std::int64_t) const) {
    bench::Worst* w = worst(operation, "topk_indices");
    if (w == nullptr) return;
    for (std::int64_t i = 0; i < file_.length; ++i) {
      const std::int32_t* list = ids.as<std::int32_t>() + i * ids.view().shape[1];
      w->add_exact(Ids(list, list + lengths.as<std::int32_t>()[i]) == (this->*golden)(i),
                   [&] { return fmt::format("batch {} row {}", e, i); });
    }
  }

  void compare_selection(std::int64_t e) {
    const Array query = file_.rows("query", e, dtype_), weights = file_.rows("weights", e, dtype_);
    const Array keys(dtype_, {pools(), dim()});
    GoldenReader::rule(golden_keys_.view().rank == 2 && golden_keys_.view().shape[1] == dim() &&
                           golden_keys_.view().shape[0] >= pools(),
                       "pool_keys must be [b, pools, dim]", golden_keys_);
    for (std::int64_t n = 0; n < keys.elements(); ++n)
      store_double(keys.view().data, dtype_, n, element(golden_keys_, n));
    const std::int64_t selected = file_.topk / file_.pool_size,
                       tail = file_.always_select_tail ? file_.pool_size - 1 : 0;
    const Array found(DType::kI32, {file_.length, selected}), lengths(DType::kI32, {file_.length}),
        ids(DType::kI32, {file_.length, file_.topk + tail});
    IndexTopkArgs select;
    select.index_query = query;
    select.index_key = keys;
    select.index_weights = weights;
    select.starts = ids_of(pool_rows_.starts);
    select.ends = ids_of(pool_rows_.ends);
    select.topk_indices = found;
    select.topk_lengths = lengths;
    select.dot_scale = file_.dot_scale;
    call(index_topk, index_topk_workspace_bytes, select);
    compare_lists("index_topk", e, found, lengths, &KpoolComparer::golden_pools);

    for (std::int64_t i = 0; i < file_.length; ++i) {
      Ids golden = golden_pools(i);
      golden.resize(static_cast<std::size_t>(selected), -1);
      std::copy(golden.begin(), golden.end(), found.as<std::int32_t>() + i * selected);
    }
    call(expand_pools, expand_pools_workspace_bytes,
         ExpandPoolsArgs{found, ids_of(layout_.bases), ids_of(token_rows_.starts),
                         ids_of(token_rows_.ends), file_.pool_size, file_.always_select_tail, ids,
                         lengths});
    compare_lists("expand_pools", e, ids, lengths, &KpoolComparer::golden_tokens);
  }

  const KpoolFile& file_;
  Array ape_, key_, gate_, golden_keys_, golden_ids_;
  PoolLayout layout_;
  RowRanges token_rows_, pool_rows_;
  bool layout_ok_ = true;
  std::string layout_where_;
};

}  // namespace

std::vector<GoldenResult> check_golden_kpool(const std::filesystem::path& path) {
  const KpoolFile file(path);
  std::vector<GoldenResult> results;
  if (bench::Placement::current() == nullptr)  // GPUs leave f64 to CPUs
    results = KpoolComparer(file, DType::kF64, "reference").run();
  const Array row(DType::kF32, {1, 8}), base(DType::kI32, {1});
  for (const Verdict& v :
       explain(PoolKeysArgs{row, row, row, base, PoolRounding::kOnce, row.clone()}).verdicts) {
    for (GoldenResult& result : KpoolComparer(file, DType::kF32, v.implementation).run())
      results.push_back(std::move(result));
  }
  return results;
}

}  // namespace winnow::app
