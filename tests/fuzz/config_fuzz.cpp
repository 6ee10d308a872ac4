// Any bytes as a training configuration: a configuration or a winnow::Error, and what was read is
// written and read again as the same.
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "train/config.h"
#include "winnow/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using nlohmann::json;
  const json parsed = json::parse(data, data + size, nullptr, false);
  if (parsed.is_discarded()) return 0;
  try {
    const winnow::train::TrainConfig config = winnow::train::read_train_config(parsed);
    const json written = winnow::train::write_train_config(config);
    const auto again = winnow::train::read_train_config(written);
    if (!winnow::train::first_difference(config, again).empty()) std::abort();
  } catch (const winnow::Error&) {
  }
  return 0;
}
