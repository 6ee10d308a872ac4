// Ranks as threads of this process, with memory for a network: what takes seconds to start as
// processes runs in a unit test. The engines of src/comm have tests of their own.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/each.h"
#include "winnow/communicator.h"

namespace winnow::testing {

// What the ranks of one group look at together.
struct Meeting {
  explicit Meeting(std::int64_t ranks) : size(ranks), offered(static_cast<std::size_t>(ranks)) {}

  // Returns when all have come, or throws where one never will.
  void wait() {
    std::unique_lock lock(mutex);
    const std::int64_t round = rounds;
    if (++arrived == size) {
      arrived = 0;
      ++rounds;
      changed.notify_all();
      return;
    }
    changed.wait(lock, [&] { return rounds != round || broken; });
    if (broken) throw std::runtime_error("another rank has failed");
  }
  void leave() {
    const std::lock_guard lock(mutex);
    broken = true;
    changed.notify_all();
    for (const std::shared_ptr<Meeting>& part : descendants) part->leave();
  }

  const std::int64_t size;
  std::vector<std::span<const std::byte>> offered;         // by rank, between two calls of wait
  std::map<std::int64_t, std::shared_ptr<Meeting>> parts;  // of a split, by color
  std::vector<std::shared_ptr<Meeting>> descendants;
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t arrived = 0, rounds = 0;
  bool broken = false;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Meeting> meeting, std::int64_t rank)
      : meeting_(std::move(meeting)), rank_(rank) {}
  std::int64_t size() const override { return meeting_->size; }
  std::int64_t rank() const override { return rank_; }

  // Calls that move data, and the bytes that this rank has sent with them.
  std::int64_t exchanges = 0, bytes_sent = 0;

 private:
  template <class Take>
  void exchange(std::span<const std::byte> mine, Take&& take) {
    ++exchanges;
    bytes_sent += static_cast<std::int64_t>(mine.size());
    meeting_->offered[static_cast<std::size_t>(rank_)] = mine;
    meeting_->wait();
    take(meeting_->offered);
    meeting_->wait();
  }
  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    exchange(mine, [&](const auto& offered) {
      for (std::size_t r = 0; r < offered.size(); ++r) {
        std::memcpy(all.data() + r * mine.size(), offered[r].data(), mine.size());
      }
    });
  }
  void do_all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    exchange(send, [&](const auto& offered) {
      const std::size_t part = send.size() / offered.size();
      for (std::size_t r = 0; r < offered.size(); ++r) {
        std::memcpy(receive.data() + r * part,
                    offered[r].data() + static_cast<std::size_t>(rank_) * part, part);
      }
    });
  }
  void do_broadcast(std::span<std::byte> data, std::int64_t root) override {
    exchange(data, [&](const auto& offered) {
      if (rank_ == root) return;
      std::memcpy(data.data(), offered[static_cast<std::size_t>(root)].data(), data.size());
    });
  }
  void do_barrier() override { meeting_->wait(); }
  std::unique_ptr<Communicator> do_split(std::int64_t color, std::int64_t key) override {
    struct Place {
      std::int64_t color, key, rank;
      auto operator<=>(const Place&) const = default;
    };
    const Place mine = {color, key, rank_};
    std::vector<Place> all(meeting_->offered.size());
    do_all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    std::erase_if(all, [&](const Place& place) { return place.color != color; });
    std::ranges::sort(all);
    std::shared_ptr<Meeting> part;
    {
      const std::lock_guard lock(meeting_->mutex);
      std::shared_ptr<Meeting>& shared = meeting_->parts[color];
      if (!shared) {
        shared = std::make_shared<Meeting>(static_cast<std::int64_t>(all.size()));
        meeting_->descendants.push_back(shared);
      }
      part = shared;
    }
    meeting_->wait();
    if (rank_ == 0) meeting_->parts.clear();
    meeting_->wait();
    return std::make_unique<ThreadCommunicator>(part, std::ranges::find(all, mine) - all.begin());
  }

  const std::shared_ptr<Meeting> meeting_;
  const std::int64_t rank_;
};

// body(ThreadCommunicator&) on every rank at once, each computing on one thread; rethrows the first
// error.
template <class Body>
void run_ranks(std::int64_t ranks, Body&& body) {
  const ThreadsGuard one_thread(1);
  const auto meeting = std::make_shared<Meeting>(ranks);
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ThreadCommunicator communicator(meeting, rank);
        body(communicator);
      } catch (...) {
        {
          const std::lock_guard lock(meeting->mutex);
          if (!error) error = std::current_exception();
        }
        meeting->leave();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace winnow::testing
