// wgmma of bf16 with f32 sums, d[64, kN] (+)= a[64, 16] b[16, kN], by a warpgroup, in the shapes and
// orders of attention: operands in shared memory in either order, or a in registers.
//
// Shared memory holds slabs of 64 elements along the contiguous axis: rows of 128 bytes with the 128-byte
// swizzle. An operand whose contiguous axis is the summed one takes `descriptor` (wgmma.h) of its slab;
// one whose contiguous axis is the other takes `transposed_descriptor`, its slabs of 64 being
// kSlabBytes apart.
//
// Of thread 4 g + c of warp w of the warpgroup, d[4 b + 2 r + e] is row 16 w + g + 8 r, column
// 8 b + 2 c + e; a in registers: pairs along the summed axis that begin at 2 c and 2 c + 8 in rows g and
// g + 8, as of mma (cuda/mma.h).
#pragma once

#include "cuda/sm90/wgmma.h"

namespace winnow::cuda::sm90 {

inline constexpr int kSlabBytes = 64 * 128;

__device__ inline std::uint32_t transposed_descriptor(std::uint32_t address) {
  return static_cast<std::uint32_t>(kSlabBytes >> 4 << 16) | ((address & 0x3ffff) >> 4);
}
// Where 16 bytes, the `unit`-th of a row of a slab, lie.
__device__ inline std::uint32_t swizzled(int row, int unit) {
  return static_cast<std::uint32_t>(row * 128 + ((unit ^ (row & 7)) << 4));
}
// Writes to shared memory by this thread become visible to products.
__device__ inline void fence_to_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Until all but the last kPending groups are done; not across the edge of a loop (wgmma.h).
template <int kPending>
__device__ void products_wait_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define WINNOW_REGISTERS_32                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define WINNOW_REGISTERS_64                                                                  \
  WINNOW_REGISTERS_32                                                                        \
  ","                                                                                        \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
  "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WINNOW_REGISTERS_96                                                                  \
  WINNOW_REGISTERS_64                                                                        \
  ","                                                                                        \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WINNOW_REGISTERS_128                                                               \
  WINNOW_REGISTERS_96                                                                      \
  ","                                                                                      \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113," \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WINNOW_SUMS_8(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WINNOW_SUMS_32_FROM(i) \
  WINNOW_SUMS_8(i), WINNOW_SUMS_8(i + 8), WINNOW_SUMS_8(i + 16), WINNOW_SUMS_8(i + 24)
#define WINNOW_SUMS_32 WINNOW_SUMS_32_FROM(0)
#define WINNOW_SUMS_64 WINNOW_SUMS_32, WINNOW_SUMS_32_FROM(32)
#define WINNOW_SUMS_96 WINNOW_SUMS_64, WINNOW_SUMS_32_FROM(64)
#define WINNOW_SUMS_128 WINNOW_SUMS_96, WINNOW_SUMS_32_FROM(96)

// kTa, kTb: 1 where the operand is transposed. The numbers after the sums are those of the inputs.
#define WINNOW_PRODUCT(n, sums, a_, b_, p_, high_, ta_, tb_)                              \
  asm volatile("{\n.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" #p_                \
               ", 0;\n"                                                                   \
               "mov.b64 da, {%" #a_ ", %" #high_ "};\nmov.b64 db, {%" #b_ ", %" #high_    \
               "};\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n                                     \
               "k16.f32.bf16.bf16 {" WINNOW_REGISTERS_##sums "}, da, db, p, 1, 1, %" #ta_ \
                                                             ", %" #tb_ ";\n}\n"          \
               : WINNOW_SUMS_##sums                                                       \
               : "r"(a), "r"(b), "r"(accumulate), "r"(kDescriptorHigh), "n"(kTa), "n"(kTb))

template <int kTa, int kTb, int kSums>
__device__ void multiply_bf16(float (&d)[kSums], std::uint32_t a, std::uint32_t b, int accumulate) {
  static_assert(kSums == 32 || kSums == 64 || kSums == 96 || kSums == 128);
  if constexpr (kSums == 32) WINNOW_PRODUCT(64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (kSums == 64) WINNOW_PRODUCT(128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (kSums == 96) WINNOW_PRODUCT(192, 96, 96, 97, 98, 99, 100, 101);
  if constexpr (kSums == 128) WINNOW_PRODUCT(256, 128, 128, 129, 130, 131, 132, 133);
}

// a in registers; b's contiguous axis is the summed one.
__device__ inline void multiply_bf16(float (&d)[32], const std::uint32_t (&a)[4], std::uint32_t b,
                                     int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %37, 0;\nmov.b64 db, {%36, %38};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" WINNOW_REGISTERS_32
      "}, {%32, %33, %34, %35}, db, p, 1, 1, 0;\n}\n"
      : WINNOW_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "r"(kDescriptorHigh));
}

// a in registers; b's contiguous axis is the other one.
__device__ inline void multiply_bf16_transposed(float (&d)[128], const std::uint32_t (&a)[4],
                                                std::uint32_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %133, 0;\nmov.b64 db, {%132, %134};\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WINNOW_REGISTERS_128
      "}, {%128, %129, %130, %131}, db, p, 1, 1, 1;\n}\n"
      : WINNOW_SUMS_128
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "r"(kDescriptorHigh));
}

#undef WINNOW_PRODUCT
#undef WINNOW_REGISTERS_32
#undef WINNOW_REGISTERS_64
#undef WINNOW_REGISTERS_96
#undef WINNOW_REGISTERS_128
#undef WINNOW_SUMS_8
#undef WINNOW_SUMS_32_FROM
#undef WINNOW_SUMS_32
#undef WINNOW_SUMS_64
#undef WINNOW_SUMS_96
#undef WINNOW_SUMS_128

}  // namespace winnow::cuda::sm90
