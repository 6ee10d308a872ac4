#include "base/arithmetic.h"

namespace winnow {

double& counted_flops() {
  static thread_local double flops = 0;
  return flops;
}

}  // namespace winnow
