// The loops that measure a GPU. They are queued on the default stream of the current device.
#pragma once

#include <cstdint>

namespace winnow::cuda {

// bf16 products on the tensor cores (mma.sync m16n8k16 with f32 sums), as many chains as keep them
// busy. Returns the FLOPs that are queued.
double queue_products(std::int64_t steps, float* sink);
// Reads, or writes, n floats `passes` times over. n: a multiple of 4.
void queue_reads(const float* p, std::int64_t n, std::int64_t passes, float* sink);
void queue_writes(float* p, std::int64_t n, std::int64_t passes);

}  // namespace winnow::cuda
