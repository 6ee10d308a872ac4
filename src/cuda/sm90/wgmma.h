// wgmma: d[64, 128] (+)= a[64, k] b[128, k]^T by a warpgroup, both operands in shared memory, along k in
// rows of 128 bytes with the 128-byte swizzle, sums in f32. One instruction takes 32 bytes of k.
//
// Of thread 4 g + c of warp w of the warpgroup, d[4 b + 2 r + e] is row 16 w + g + 8 r, column
// 8 b + 2 c + e.
#pragma once

#include <cstdint>

#include "base/numbers.h"

namespace winnow::cuda::sm90 {

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// For all of this warpgroup: with a wait for fewer across the edge of a loop, ptxas would serialise all
// products (C7514).
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Keeps the compiler from moving a use of the sums across a wait or an issue.
template <int kSize>
__device__ void pin(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of an operand: groups of 8 rows 1024 bytes apart, 128-byte swizzle. Its high word is
// constant and only the low word moves, so that descriptors stay in uniform registers.
constexpr std::uint32_t kDescriptorHigh = (1u << 30) | (1024 >> 4);
__device__ inline std::uint32_t descriptor(std::uint32_t address) {
  return (1u << 16) | ((address & 0x3ffff) >> 4);
}

#define WINNOW_REGISTERS_64                                                          \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"   \
  "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41," \
  "%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
  "%62,%63"
#define WINNOW_SUMS_8(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WINNOW_SUMS_64                                                                         \
  WINNOW_SUMS_8(0), WINNOW_SUMS_8(8), WINNOW_SUMS_8(16), WINNOW_SUMS_8(24), WINNOW_SUMS_8(32), \
      WINNOW_SUMS_8(40), WINNOW_SUMS_8(48), WINNOW_SUMS_8(56)

// T: BF16 or E4M3.
template <class T>
__device__ void multiply(float (&d)[64], std::uint32_t a, std::uint32_t b, int accumulate) {
#define WINNOW_PRODUCT(instruction, tail)                                                       \
  asm volatile(                                                                                 \
      "{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %66, 0;\n"                           \
      "mov.b64 da, {%64, %67};\nmov.b64 db, {%65, %67};\n" instruction " {" WINNOW_REGISTERS_64 \
      "}, da, db, p, 1, 1" tail ";\n}\n"                                                        \
      : WINNOW_SUMS_64                                                                          \
      : "r"(a), "r"(b), "r"(accumulate), "r"(kDescriptorHigh))
  if constexpr (sizeof(T) == 1) {
    WINNOW_PRODUCT("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3", "");
  } else {
    WINNOW_PRODUCT("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", ", 0, 0");
  }
#undef WINNOW_PRODUCT
}

#undef WINNOW_REGISTERS_64
#undef WINNOW_SUMS_8
#undef WINNOW_SUMS_64

}  // namespace winnow::cuda::sm90
