// In place of nccl/nccl.cpp where CUDA or NCCL is missing.
#include "base/check.h"
#include "comm/nccl.h"
#include "winnow/communicator.h"

namespace winnow {

std::unique_ptr<Communicator> nccl_communicator(Communicator&, Device, Stream) {
  fail(Status::kUnsupported, "nccl", "{}", nccl_refusal());
}

const std::string& nccl_refusal() {
  static const std::string refusal =
      "this winnow was built without NCCL: configure with -DWINNOW_CUDA=ON and "
      "-DWINNOW_NCCL_ROOT=..., a folder with include/nccl.h and lib/libnccl.so.2";
  return refusal;
}

namespace comm {

const std::string& nccl_version() {
  static const std::string none;
  return none;
}

}  // namespace comm
}  // namespace winnow
