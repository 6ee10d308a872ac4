// Any bytes as a safetensors file: tensors that can be read, or a winnow::Error.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "model/safetensors.h"
#include "winnow/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const int fd = memfd_create("fuzz", 0);
  if (fd < 0 || write(fd, data, size) != static_cast<ssize_t>(size)) std::abort();
  try {
    const winnow::model::SafetensorsFile file("/proc/self/fd/" + std::to_string(fd));
    for (const winnow::model::SafetensorsEntry& entry : file.entries()) {
      if (entry.shape.size() <= winnow::kMaxRank) file.read(entry.name);
    }
  } catch (const winnow::Error&) {
  }
  close(fd);
  return 0;
}
