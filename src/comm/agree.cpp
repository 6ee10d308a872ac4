#include "comm/agree.h"

#include <algorithm>
#include <functional>
#include <new>
#include <span>
#include <vector>

#include "base/check.h"
#include "comm/collectives.h"

namespace winnow::comm {
namespace {

struct Outcome {
  std::int64_t failed = 0, status = 0;
  std::uint64_t words = 0;  // their hash
};

Status status_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.status();
  } catch (...) {
    return Status::kIo;  // the system refused, as with memory
  }
}

std::string text_from(Communicator& group, const std::string& mine, std::int64_t root) {
  std::int64_t length = std::ssize(mine);
  group.broadcast(std::as_writable_bytes(std::span(&length, 1)), root);
  std::string text = mine;
  text.resize(static_cast<std::size_t>(length));
  group.broadcast(std::as_writable_bytes(std::span(text)), root);
  return text;
}

template <class T>
std::vector<T> of_all(Communicator& group, const T& mine) {
  std::vector<T> all(static_cast<std::size_t>(group.size()));
  all_gather<T>(group, std::span(&mine, 1), all);
  return all;
}

}  // namespace

std::string name_of(const Communicator& group, std::int64_t rank) {
  return fmt::format("rank {} of {}", rank, group.size());
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown exception";
  }
}

void agree(Communicator& group, const std::exception_ptr& mine) {
  Outcome outcome;
  std::string words;
  if (mine) {
    words = message_of(mine);
    outcome = {1, static_cast<std::int64_t>(status_of(mine)), std::hash<std::string>{}(words)};
  }
  const std::vector<Outcome> all = of_all(group, outcome);
  const auto first =
      std::find_if(all.begin(), all.end(), [](const Outcome& o) { return o.failed != 0; });
  if (first == all.end()) return;
  const std::string message = text_from(group, words, first - all.begin());
  const bool alike = std::all_of(all.begin(), all.end(), [&](const Outcome& o) {
    return o.failed != 0 && o.words == first->words;
  });
  throw GroupError(
      static_cast<Status>(first->status),
      alike ? message : fmt::format("{}: {}", name_of(group, first - all.begin()), message));
}

bool any(Communicator& group, bool mine) {
  const std::vector<std::uint8_t> all = of_all<std::uint8_t>(group, mine ? 1 : 0);
  return std::find(all.begin(), all.end(), 1) != all.end();
}

std::string text_of_first(Communicator& group, const std::string& mine) {
  return text_from(group, mine, 0);
}

}  // namespace winnow::comm
