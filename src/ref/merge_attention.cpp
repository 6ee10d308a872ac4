// output = sum_p w[p] * part_output[p] / sum_p w[p] over the parts whose lse is not -inf, in
// double.
#include <cmath>
#include <limits>

#include "ref/implementations.h"
#include "ref/reader.h"

namespace winnow::ref {
namespace {

void run(const MergeAttentionArgs& a, Workspace) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t parts = a.part_output.shape[0], rows = a.part_output.shape[1];
  const std::int64_t heads = a.part_output.shape[2], dim_v = a.part_output.shape[3];
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      auto for_each_part = [&](auto&& visit) {  // that contributes
        for (std::int64_t p = 0; p < parts; ++p) {
          const double lse = get(a.part_lse, p, i, h);
          if (lse != -kInfinity) visit(p, lse);
        }
      };
      double maximum = -kInfinity, sum = 0, last_lse = 0;
      std::int64_t contributing = 0;
      for_each_part([&](std::int64_t, double lse) {
        maximum = std::fmax(maximum, lse);
        last_lse = lse;
        ++contributing;
      });
      for_each_part([&](std::int64_t, double lse) { sum += std::exp(lse - maximum); });
      const bool alone = contributing == 1;
      set(a.lse, i, h, alone ? last_lse : maximum + std::log(sum));
      for (std::int64_t c = 0; c < dim_v; ++c) {
        double weighted = 0;
        for_each_part([&](std::int64_t p, double lse) {
          const double x = get(a.part_output, p, i, h, c);
          weighted = alone ? x : weighted + std::exp(lse - maximum) * x / sum;
        });
        set(a.output, i, h, c, weighted);
      }
    }
  }
}

}  // namespace

const Implementation<MergeAttentionArgs> merge_attention_implementation = {"reference", accept,
                                                                           no_workspace, run};

}  // namespace winnow::ref
