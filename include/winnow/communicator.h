// A group of processes (ranks) that exchange data.
//
// Every member calls the same functions in the same order, with the same sizes; a call returns when
// this rank's part of it is done (on a GPU: queued). What breaks a rule of its own arguments is
// winnow::Error. In validation mode (validation.h) the ranks compare their calls first, and the one
// that differs is named on all of them; without it a call that others do not make waits for ever,
// as is usual.
//
// A group belongs to one thread. Buffers lie on its device and must not overlap; they may be larger
// than 2^31 bytes. Data only moves here: sums have their order from src/comm/collectives.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "winnow/tensor.h"

namespace winnow {

class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual std::int64_t size() const = 0;
  virtual std::int64_t rank() const = 0;
  virtual Device device() const { return {}; }  // of the buffers
  virtual Stream stream() const { return {}; }  // on a GPU, what calls are queued on

  // all [size x bytes of mine]: `mine` of every rank, in the order of ranks.
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all);
  // The i-th of size() equal parts of `send` goes to rank i, and the i-th of `receive` comes from
  // there.
  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive);
  // What rank `root` has comes to all.
  void broadcast(std::span<std::byte> data, std::int64_t root);
  // Returns when all ranks have called it.
  void barrier();
  // A group for every color that ranks give, of those who give it, in the order of their keys (of
  // their ranks where keys are equal).
  std::unique_ptr<Communicator> split(std::int64_t color, std::int64_t key);

 private:
  // An engine: the same, of arguments that have been checked. No size is 0.
  virtual void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;
  virtual void do_all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) = 0;
  virtual void do_broadcast(std::span<std::byte> data, std::int64_t root) = 0;
  virtual void do_barrier() = 0;
  virtual std::unique_ptr<Communicator> do_split(std::int64_t color, std::int64_t key) = 0;

  void compare_calls(int call, std::size_t bytes, std::int64_t root);
};

// The group of this process alone.
std::unique_ptr<Communicator> single_communicator();

// All processes that mpirun, or another launcher of MPI, started together. MPI begins with the first
// group, unless the program has begun it, and ends with the last; a program that leaves by an
// exception leaves MPI running, so that the launcher ends the other ranks. Throws kUnsupported in a
// build without MPI.
std::unique_ptr<Communicator> mpi_communicator();
// Why there is no MPI: "" where there is.
const std::string& mpi_refusal();

// The ranks of `host`, each with a GPU of its own, on which buffers lie. A call is queued on the
// stream and returns at once, but for barrier and split, which wait. `host` is used for what starts
// a group, and must outlive it.
std::unique_ptr<Communicator> nccl_communicator(Communicator& host, Device device,
                                                Stream stream = {});
// Why there is no NCCL, or no GPU for it: "" where there is.
const std::string& nccl_refusal();

}  // namespace winnow
