// The indexer loss of one row, KL(target || softmax of the scores), in double.
#pragma once

#include <cmath>
#include <cstdint>

namespace winnow::ref {

// max(x, 1e-10) that keeps NaN.
inline double clamped(double x) { return x < 1e-10 ? 1e-10 : x; }

// What a row's loss needs of the whole row, gathered key by key.
struct RowLoss {
  double mass = 0;             // sum of the target
  double maximum = -INFINITY;  // of the scores
  double sum = 0;              // of exp(score - maximum)

  void see(double target, double score) {
    mass += target;
    if (score > maximum) {
      sum *= std::exp(maximum - score);
      maximum = score;
    }
    // A NaN score never is the maximum; it reaches the sum.
    if (score != -INFINITY) sum += score == INFINITY ? NAN : std::exp(score - maximum);
  }
  double t(double target) const { return target / clamped(mass); }
  double log_p(double score) const { return score - maximum - std::log(sum); }
  // One key's share of the loss; 0 ln 0 = 0, also where p is 0.
  double kl(double target, double score) const {
    const double share = t(target);
    return share == 0 ? 0 : share * (std::log(clamped(share)) - log_p(score));
  }
  // Derivative of the loss by the score.
  double gradient(double target, double score) const { return std::exp(log_p(score)) - t(target); }
  bool empty() const { return sum == 0; }
};

}  // namespace winnow::ref
