// layouts.json of a directory of golden vectors: positions and key orders of context parallel ranks,
// and which layers compute indices. All are whole numbers, and must be equal.
#include <nlohmann/json.hpp>

#include "apps/winnow/golden.h"
#include "base/check.h"
#include "base/file.h"
#include "layout/index_sharing.h"
#include "winnow/context_parallel.h"

namespace winnow::app {
namespace {

using nlohmann::json;
using Numbers = std::vector<std::int64_t>;

// Compares lists of one kind and keeps the first miss.
class ListComparer {
 public:
  explicit ListComparer(std::string operation) : operation_(std::move(operation)) {}

  template <class Value>
  void compare(const std::string& name, std::size_t entry, const std::vector<Value>& ours,
               const json& theirs) {
    auto& comparison = find(name);
    const auto expected = theirs.get<std::vector<Value>>();
    if (ours == expected) return;
    comparison.error += 1;
    std::size_t at = 0;
    while (at < std::min(ours.size(), expected.size()) && ours[at] == expected[at]) ++at;
    if (comparison.where.empty()) comparison.where = fmt::format("entry {}, number {}", entry, at);
  }

  GoldenResult result() const {
    bench::CheckResult result{"", "", comparisons_, ""};
    for (const bench::Comparison& c : comparisons_) {
      if (!c.ok() && result.failure.empty()) {
        result.failure = fmt::format("{}: {} lists differ, the first at {}", c.output,
                                     static_cast<int>(c.error), c.where);
      }
    }
    return {operation_, result};
  }

 private:
  bench::Comparison& find(const std::string& name) {
    for (bench::Comparison& c : comparisons_) {
      if (c.output == name) return c;
    }
    comparisons_.push_back({name, 0, true, ""});
    return comparisons_.back();
  }

  std::string operation_;
  std::vector<bench::Comparison> comparisons_;
};

// One entry: the rows of every rank, and the order of the keys.
void compare_tables(const Numbers& cu_seqlens, std::int64_t local_rows, const json& entry,
                    const json& positions, std::size_t number, ListComparer& comparer) {
  const auto cp_size = entry.at("cp_size").get<std::int64_t>();
  WINNOW_CHECK("golden", static_cast<std::int64_t>(positions.size()) == cp_size,
               "an entry must hold the positions of {} ranks, got {}", cp_size, positions.size());
  for (std::int64_t rank = 0; rank < cp_size; ++rank) {
    comparer.compare("positions", number,
                     context_parallel_positions(cu_seqlens, cp_size, rank, local_rows),
                     positions.at(static_cast<std::size_t>(rank)));
  }
  comparer.compare("key_reorder", number,
                   context_parallel_key_order(cu_seqlens, cp_size, local_rows),
                   entry.at("key_reorder"));
}

GoldenResult check_tables(const json& file) {
  ListComparer comparer("context_parallel");
  std::size_t number = 0;
  for (const json& entry : file.value("zigzag", json::array())) {
    const auto length = entry.at("seq_len").get<std::int64_t>();
    const auto cp_size = entry.at("cp_size").get<std::int64_t>();
    WINNOW_CHECK("golden", cp_size >= 1, "cp_size must be at least 1, got {}", cp_size);
    compare_tables({0, length}, length / cp_size, entry, entry.at("positions"), number++, comparer);
  }
  for (const json& entry : file.value("packed", json::array())) {
    compare_tables(entry.at("cu_seqlens").get<Numbers>(),
                   entry.at("local_rows").get<std::int64_t>(), entry, entry.at("query_positions"),
                   number++, comparer);
  }
  return comparer.result();
}

GoldenResult check_sharing(const json& file) {
  ListComparer comparer("index_sharing");
  std::size_t number = 0;
  for (const json& entry : file.value("index_share", json::array())) {
    const IndexSharing sharing{entry.at("freq").get<std::int64_t>(),
                               entry.at("offset").get<std::int64_t>()};
    std::vector<bool> computes;
    Numbers source;
    for (std::size_t n = 1; n <= entry.at("computes").size(); ++n) {
      computes.push_back(computes_indices(sharing, static_cast<std::int64_t>(n)));
      source.push_back(index_source(sharing, static_cast<std::int64_t>(n)));
    }
    comparer.compare("computes", number, computes, entry.at("computes"));
    comparer.compare("source", number, source, entry.at("source"));
    ++number;
  }
  return comparer.result();
}

}  // namespace

std::vector<GoldenResult> check_golden_layouts(const std::filesystem::path& path) {
  const json file = json::parse(read_file("golden", path));
  WINNOW_CHECK("golden", file.is_object(), "{} must hold an object", path.string());
  std::vector<GoldenResult> results;
  if (file.contains("zigzag") || file.contains("packed")) results.push_back(check_tables(file));
  if (file.contains("index_share")) results.push_back(check_sharing(file));
  WINNOW_CHECK("golden", !results.empty(), "{} must hold zigzag, packed or index_share, got none",
               path.string());
  return results;
}

}  // namespace winnow::app
