// The product kernel of nn::matmul: its arguments and what each instruction set exports.
#pragma once

#include "base/implementation.h"

namespace winnow {

// C = A . B, or C += A . B. Checked by nn::matmul: shapes agree, all f32 or all f64.
struct MatmulArgs {
  Tensor a;  // [M, K]
  Tensor b;  // [K, N]
  Tensor c;  // [M, N]
  bool accumulate = false;
};

namespace cpu::portable {
extern const Implementation<MatmulArgs> matmul_implementation;
}
namespace cpu::avx2 {
extern const Implementation<MatmulArgs> matmul_implementation;
}
namespace cpu::avx512 {
extern const Implementation<MatmulArgs> matmul_implementation;
}

}  // namespace winnow
