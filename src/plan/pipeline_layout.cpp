#include "plan/pipeline_layout.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace winnow::plan {
namespace {

constexpr char kOption[] = "plan.layout";
constexpr std::size_t kMaxLetters = std::size_t{1} << 16;

bool is_letter(char c) { return c == 'E' || c == 't' || c == 'm' || c == 'L'; }

// The number after text[at] == '*', and where it ends; -1 where there is none.
struct Count {
  std::int64_t value = -1;
  std::size_t end = 0;
};
Count count_at(const std::string& text, std::size_t at) {
  Count count;
  if (at >= text.size() || text[at] != '*') return count;
  const char* begin = text.data() + at + 1;
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), count.value);
  if (error != std::errc() || !std::isdigit(static_cast<unsigned char>(*begin))) return {};
  count.end = static_cast<std::size_t>(end - text.data());
  return count;
}

// Says once that the text grows beyond any model.
bool append(std::string& out, const std::string& part, std::int64_t times, Rules& rules) {
  const auto room = static_cast<std::int64_t>(kMaxLetters - std::min(out.size(), kMaxLetters));
  const bool fits = part.empty() || times <= room / static_cast<std::int64_t>(part.size());
  rules.require(fits, kOption, fmt::format("{}*{}", part.substr(0, 40), times), "fewer",
                "must write out to at most {} letters", kMaxLetters);
  for (std::int64_t i = 0; fits && i < times; ++i) out += part;
  return fits;
}

// "(text)*n" -> text n times. Groups do not nest.
std::string expand_groups(const std::string& text, Rules& rules) {
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    if (text[i] != '(') {
      out += text[i++];
      continue;
    }
    const std::size_t close = text.find_first_of("()", i + 1);
    const bool closed = close != std::string::npos && text[close] == ')' && close > i + 1;
    const Count count = closed ? count_at(text, close + 1) : Count();
    if (count.value < 0) {
      rules.require(false, kOption, "\"" + text.substr(i, 40) + "\"", "(t|)*2",
                    "must write a group as (text)*n, without another group inside");
      return "";
    }
    if (!append(out, text.substr(i + 1, close - i - 1), count.value, rules)) return "";
    i = count.end;
  }
  return out;
}

std::string repeated(char letter, std::int64_t times) {
  if (times == 0) return "";
  return times == 1 ? std::string(1, letter) : fmt::format("{}*{}", letter, times);
}

// The decoder layers of every stage from the numbers of their first layers.
void number_layers(PipelineLayout& layout) {
  std::int64_t next = 1;
  for (std::size_t s = 0; s < layout.stages.size(); ++s) {
    Stage& stage = layout.stages[s];
    stage.number = static_cast<std::int64_t>(s);
    stage.rank = stage.number % layout.ranks;
    stage.virtual_stage = stage.number / layout.ranks;
    stage.first_layer = next;
    next += stage.layers;
  }
}

std::string place(const Stage& stage) {
  return fmt::format("stage {} (rank {}, virtual stage {})", stage.number, stage.rank,
                     stage.virtual_stage);
}

// What may stand where in the letters of a layout.
void check_letters(const std::string& letters, std::int64_t layers, std::int64_t mtp_depths,
                   Rules& rules) {
  const auto total = [&](char c) { return std::count(letters.begin(), letters.end(), c); };
  const std::size_t first = letters.find_first_not_of('|'), last = letters.find_last_not_of('|');
  const auto letter_at = [&](std::size_t at) {
    return at == std::string::npos ? std::string("nothing") : std::string(1, letters[at]);
  };
  rules.require(letter_at(first) == "E", kOption, letter_at(first), "Et*1|t*1L",
                "must begin with the embedding E");
  rules.require(letter_at(last) == "L", kOption, letter_at(last), "Et*1|t*1L",
                "must end with the loss L");
  rules.require(total('E') == 1, kOption, total('E'), "one E", "must hold exactly one E");
  rules.require(total('L') == 1, kOption, total('L'), "one L", "must hold exactly one L");
  rules.require(total('t') == layers, kOption, total('t'), fmt::format("layers {}", total('t')),
                "must hold one t for each of layers = {}", layers);
  rules.require(total('m') == mtp_depths, kOption, total('m'),
                fmt::format("mtp_depths {}", total('m')),
                "must hold one m for each of mtp_depths = {}", mtp_depths);
  const std::size_t mtp = letters.find('m');
  if (mtp == std::string::npos) return;
  const std::size_t late = letters.find('t', mtp);
  rules.require(late == std::string::npos, kOption, letters.substr(mtp, 40), "every t before m",
                "must have no decoder layer t after multi-token prediction m");
}

// Where multi-token prediction may lie.
void check_mtp(const PipelineLayout& layout, Rules& rules) {
  std::int64_t stages = 0;
  for (const Stage& stage : layout.stages) {
    if (stage.mtp_depths == 0) continue;
    ++stages;
    const std::int64_t last = layout.virtual_stages - 1;
    rules.require(stage.virtual_stage == last, kOption, place(stage),
                  fmt::format("a stage from {} on", last * layout.ranks),
                  "must have multi-token prediction in the last virtual stage of its rank{}",
                  stage.rank == 0 ? ", and never on the first rank before it" : "");
  }
  rules.require(stages <= 1, kOption, fmt::format("{} stages", stages), "one stage",
                "must have all depths of multi-token prediction in one stage, since they are one "
                "layer");
}

// A layer that reuses indices whose source does not lie in its stage.
struct Orphan {
  std::int64_t layer = 0, source = 0;
};

// Which layers reuse whose indices, and which of them are DSA layers.
struct Schedule {
  const IndexSharing& sharing;
  std::int64_t layers;
  const std::function<bool(std::int64_t)>& is_dsa;
  std::int64_t mtp_layers;

  bool dsa(std::int64_t layer) const { return !is_dsa || is_dsa(layer); }

  // The first orphan of a stage; layer 0 where there is none.
  Orphan orphan_in(const Stage& stage) const {
    const std::int64_t end = stage.first_layer + stage.layers;
    const auto check = [&](std::int64_t layer) {
      const std::int64_t source = index_source(sharing, layer);
      const bool here = (source >= stage.first_layer && source < end) || source > layers;
      return dsa(layer) && !(here && dsa(source)) ? Orphan{layer, source} : Orphan();
    };
    for (std::int64_t layer = stage.first_layer; layer < end; ++layer) {
      if (const Orphan orphan = check(layer); orphan.layer > 0) return orphan;
    }
    for (std::int64_t n = 1; stage.mtp_depths > 0 && n <= mtp_layers; ++n) {
      if (const Orphan orphan = check(layers + n); orphan.layer > 0) return orphan;
    }
    return {};
  }

  bool valid(const PipelineLayout& layout) const {
    return std::none_of(layout.stages.begin(), layout.stages.end(),
                        [&](const Stage& stage) { return orphan_in(stage).layer > 0; });
  }
};

// Stages that begin on layers that compute, as near as they go to where they begin now.
PipelineLayout moved(PipelineLayout layout, const Schedule& schedule) {
  const std::int64_t layers = schedule.layers;
  const auto computes = [&](std::int64_t n) { return computes_indices(schedule.sharing, n); };
  std::vector<std::int64_t> begins;
  for (const Stage& stage : layout.stages) {
    std::int64_t begin = stage.first_layer;
    if (stage.layers > 0) {
      std::int64_t later = begin, earlier = begin;
      while (later <= layers && !computes(later)) ++later;
      while (!computes(earlier)) --earlier;
      begin = later <= layers && later - begin <= begin - earlier ? later : earlier;
    }
    begins.push_back(begins.empty() ? 1 : std::max(begin, begins.back()));
  }
  begins.push_back(layers + 1);
  for (std::size_t s = 0; s < layout.stages.size(); ++s) {
    layout.stages[s].layers = begins[s + 1] - begins[s];
  }
  number_layers(layout);
  return layout;
}

}  // namespace

bool PipelineLayout::mtp_standalone() const {
  for (const Stage& stage : stages) {
    if (stage.mtp_depths > 0 && stage.rank != ranks - 1) return true;
  }
  return false;
}

std::string expand_layout(const std::string& text, Rules& rules) {
  std::string plain = text;
  plain.erase(std::remove(plain.begin(), plain.end(), ','), plain.end());
  plain = expand_groups(plain, rules);
  std::string out;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (!is_letter(plain[i]) && plain[i] != '|') {
      rules.require(false, kOption, "\"" + plain.substr(i, 40) + "\"", "Et*2|t*2L",
                    "may hold E, t, m, L, |, commas, x*n and (text)*n");
      return "";
    }
    const Count count = count_at(plain, i + 1);
    if (!append(out, std::string(1, plain[i]), count.value < 0 ? 1 : count.value, rules)) return "";
    if (count.value >= 0) i = count.end - 1;
  }
  return out;
}

std::string layout_text(const PipelineLayout& layout) {
  std::string text;
  for (const Stage& stage : layout.stages) {
    if (stage.number > 0) text += '|';
    text += repeated('E', stage.embedding ? 1 : 0) + repeated('t', stage.layers) +
            repeated('m', stage.mtp_depths) + repeated('L', stage.loss ? 1 : 0);
  }
  return text;
}

PipelineLayout parse_layout(const std::string& text, std::int64_t ranks, std::int64_t layers,
                            std::int64_t mtp_depths, Rules& rules) {
  PipelineLayout layout;
  layout.ranks = ranks;
  Rules grammar(Rules::Mode::kCollect);
  const std::string letters = expand_layout(text, grammar);
  for (const Violation& v : grammar.violations()) rules.broken(v);
  if (!grammar.kept()) return layout;

  layout.stages.emplace_back();
  for (const char c : letters) {
    Stage& stage = layout.stages.back();
    if (c == 'E') stage.embedding = true;
    if (c == 'L') stage.loss = true;
    if (c == 't') ++stage.layers;
    if (c == 'm') ++stage.mtp_depths;
    if (c == '|') layout.stages.emplace_back();
  }
  check_letters(letters, layers, mtp_depths, rules);
  const auto stages = static_cast<std::int64_t>(layout.stages.size());
  std::int64_t divisor = std::clamp<std::int64_t>(ranks, 1, stages);
  while (stages % divisor != 0) --divisor;
  rules.require(ranks >= 1 && stages % ranks == 0, kOption, fmt::format("{} stages", stages),
                fmt::format("plan.pp {}", divisor),
                "must have a number of stages that plan.pp = {} divides", ranks);
  if (ranks < 1 || stages % ranks != 0) {
    layout.stages.clear();
    return layout;
  }
  layout.virtual_stages = stages / ranks;
  number_layers(layout);
  check_mtp(layout, rules);
  return layout;
}

PipelineLayout even_layout(std::int64_t ranks, std::int64_t virtual_stages, std::int64_t layers,
                           std::int64_t mtp_depths) {
  PipelineLayout layout;
  layout.ranks = ranks;
  layout.virtual_stages = virtual_stages;
  const std::int64_t stages = ranks * virtual_stages;
  for (std::int64_t s = 0; s < stages; ++s) {
    Stage stage;
    stage.layers = layers / stages + (s < layers % stages ? 1 : 0);
    layout.stages.push_back(stage);
  }
  layout.stages.front().embedding = true;
  layout.stages.back().mtp_depths = mtp_depths;
  layout.stages.back().loss = true;
  number_layers(layout);
  return layout;
}

void check_index_sharing(const PipelineLayout& layout, const IndexSharing& sharing,
                         std::int64_t layers, Rules& rules,
                         const std::function<bool(std::int64_t)>& is_dsa, std::int64_t mtp_layers) {
  const Schedule schedule{sharing, layers, is_dsa, mtp_layers};
  if (schedule.valid(layout)) return;
  const PipelineLayout near = moved(layout, schedule);
  const std::string instead = schedule.valid(near) ? layout_text(near) : "topk_freq 1";
  for (const Stage& stage : layout.stages) {
    const Orphan orphan = schedule.orphan_in(stage);
    if (orphan.layer == 0) continue;
    rules.require(false, kOption, layout_text(layout), instead,
                  "must not have layer {}{} in {} without its source: it reuses the indices of "
                  "layer {}, which {}, and indices do not cross stages (topk_freq {}, "
                  "skip_topk_offset {})",
                  orphan.layer, orphan.layer > layers ? " (multi-token prediction)" : "",
                  place(stage), orphan.source,
                  schedule.dsa(orphan.source) ? "lies in another" : "is no DSA layer",
                  sharing.topk_freq, sharing.skip_topk_offset);
  }
}

}  // namespace winnow::plan
