// What there is of NCCL in this build.
#pragma once

#include <string>

namespace winnow::comm {

const std::string& nccl_version();  // "NCCL 2.32.3"; "" in a build without it

}  // namespace winnow::comm
