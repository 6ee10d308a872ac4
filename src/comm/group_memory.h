// The side of one rank in a sum: scratch memory where the group's buffers lie, copies there, and
// additions in the order of the ranks.
#pragma once

#include <memory>

#include "winnow/communicator.h"

namespace winnow::comm {

class GroupMemory {
 public:
  virtual ~GroupMemory() = default;
  // Scratch that lives as long as this object and what is queued of its work.
  virtual std::byte* allocate(std::int64_t bytes) = 0;
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
  virtual void zero(std::byte* data, std::int64_t bytes) = 0;
  // sums[i] = parts[0][i] + parts[1][i] + ... of f32 or f64 [parts, count]; sums may be parts[0].
  virtual void add_parts(DType dtype, const std::byte* data, std::int64_t parts, std::int64_t count,
                         std::byte* sums) = 0;
};

// Of the group's device and stream.
std::unique_ptr<GroupMemory> memory_of(const Communicator& group);

// On a GPU (comm/nccl); work is queued on the stream.
std::unique_ptr<GroupMemory> gpu_memory(Device device, Stream stream);

}  // namespace winnow::comm
