// What all engines have in common: the rules of a call, and in validation mode the comparison of
// calls between ranks.
#include "winnow/communicator.h"

#include <array>
#include <functional>
#include <vector>

#include "base/check.h"
#include "winnow/validation.h"

namespace winnow {
namespace {

constexpr const char* kOperation = "communicator";

enum Call : int { kAllGather, kAllToAll, kBroadcast, kBarrier, kSplit };

struct CallRecord {
  std::int64_t call, bytes, root;
  bool operator==(const CallRecord&) const = default;
};

std::string text_of(const CallRecord& record) {
  switch (record.call) {
    case kAllGather: return fmt::format("all_gather of {} bytes", record.bytes);
    case kAllToAll: return fmt::format("all_to_all of {} bytes", record.bytes);
    case kBroadcast: return fmt::format("broadcast of {} bytes from {}", record.bytes, record.root);
    case kBarrier: return "barrier";
    default: return "split";
  }
}

void check_apart(std::span<const std::byte> input, std::span<std::byte> output) {
  const std::less_equal<const std::byte*> at_most;
  const bool apart = input.empty() || output.empty() ||
                     at_most(input.data() + input.size(), output.data()) ||
                     at_most(output.data() + output.size(), input.data());
  WINNOW_CHECK(kOperation, apart, "input and output must not overlap, got {} and {} bytes that do",
               input.size(), output.size());
}

}  // namespace

void Communicator::all_gather(std::span<const std::byte> mine, std::span<std::byte> all) {
  const auto ranks = static_cast<std::size_t>(size());
  WINNOW_CHECK(
      kOperation, all.size() / ranks == mine.size() && all.size() % ranks == 0,
      "all_gather of {} bytes must have room for {} times as many, one for each rank, got {}",
      mine.size(), ranks, all.size());
  check_apart(mine, all);
  compare_calls(kAllGather, mine.size(), 0);
  if (!mine.empty()) do_all_gather(mine, all);
}

void Communicator::all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) {
  const auto ranks = static_cast<std::size_t>(size());
  WINNOW_CHECK(kOperation, send.size() % ranks == 0,
               "all_to_all must send as many bytes to each of {} ranks, got {} in all", ranks,
               send.size());
  WINNOW_CHECK(kOperation, receive.size() == send.size(),
               "all_to_all must receive as many bytes as it sends, {}, got room for {}",
               send.size(), receive.size());
  check_apart(send, receive);
  compare_calls(kAllToAll, send.size(), 0);
  if (!send.empty()) do_all_to_all(send, receive);
}

void Communicator::broadcast(std::span<std::byte> data, std::int64_t root) {
  WINNOW_CHECK(kOperation, root >= 0 && root < size(),
               "the root of broadcast must be a rank from 0 to {}, got {}", size() - 1, root);
  compare_calls(kBroadcast, data.size(), root);
  if (!data.empty()) do_broadcast(data, root);
}

void Communicator::barrier() {
  compare_calls(kBarrier, 0, 0);
  do_barrier();
}

std::unique_ptr<Communicator> Communicator::split(std::int64_t color, std::int64_t key) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;  // an int of MPI
  WINNOW_CHECK(kOperation, color >= 0 && color <= kMost, "color must be from 0 to {}, got {}",
               kMost, color);
  WINNOW_CHECK(kOperation, key >= 0 && key <= kMost, "key must be from 0 to {}, got {}", kMost,
               key);
  compare_calls(kSplit, 0, 0);
  return do_split(color, key);
}

// Memory of a GPU is not looked at: that would wait for its stream.
void Communicator::compare_calls(int call, std::size_t bytes, std::int64_t root) {
  if (!validation() || device().kind != Device::Kind::kCpu) return;
  const std::array<CallRecord, 1> mine = {{{call, static_cast<std::int64_t>(bytes), root}}};
  std::vector<CallRecord> all(static_cast<std::size_t>(size()));
  do_all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t r = 1; r < all.size(); ++r) {
    WINNOW_CHECK(kOperation, all[r] == all[0],
                 "every rank must make the same call, got {} on rank 0 and {} on rank {}",
                 text_of(all[0]), text_of(all[r]), r);
  }
}

}  // namespace winnow
