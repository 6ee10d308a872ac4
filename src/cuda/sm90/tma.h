// Thin wrappers of what compute capability 9.0 has beside its products: barriers in shared memory,
// copies of boxes of tensors (TMA) that complete on them, registers handed between warpgroups.
#pragma once

#include <cudaTypedefs.h>

#include <cstdint>

#include "cuda/kernel.h"

namespace winnow::cuda::sm90 {

// ---- barriers in shared memory, by address --------------------------------------------------------
__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives and announces so many bytes of copies.
__device__ inline void expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// ---- copies of boxes ------------------------------------------------------------------------------
__device__ inline void load_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier,
                                int x) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x)
      : "memory");
}
__device__ inline void load_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier,
                                int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void load_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier,
                                int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- registers ------------------------------------------------------------------------------------
template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// All lanes hold the same value: it may live in a uniform register.
__device__ inline int uniform(int x) { return __reduce_max_sync(~0u, x); }

// ---- maps -----------------------------------------------------------------------------------------
// A tensor of `rank` axes, the innermost first and contiguous, and the box that one copy takes. Strides
// in bytes, of the axes from the second on, multiples of 16. 128-byte rows are swizzled.
struct BoxedTensor {
  CUtensorMapDataType type;
  const void* data;  // aligned to 16 bytes
  unsigned rank;
  cuuint64_t extent[3], stride[2];
  cuuint32_t box[3];
  bool swizzled;
};

inline CUtensorMap tensor_map(const char* operation, const BoxedTensor& t) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess) {
      function = nullptr;
    }
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  CUtensorMap map{};
  const cuuint32_t steps[3] = {1, 1, 1};
  const bool described =
      encode != nullptr &&
      encode(&map, t.type, t.rank, const_cast<void*>(t.data), t.extent, t.stride, t.box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             t.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  check(operation, described ? cudaSuccess : cudaErrorInvalidValue, "describe a tensor to the GPU");
  return map;
}

}  // namespace winnow::cuda::sm90
