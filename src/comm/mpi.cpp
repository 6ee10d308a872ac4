// The engine for CPUs. MPI moves bytes; it is never asked to add, since the order in which it does
// is open.
#include "comm/mpi.h"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <string_view>

#include "base/check.h"

namespace winnow {
namespace comm {
namespace {

constexpr const char* kOperation = "mpi";

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  fail(Status::kIo, kOperation, "{} must succeed, got: {}", call,
       std::string_view(text.data(), static_cast<std::size_t>(length)));
}

// MPI between its begin and its end. While an exception is on its way out, other ranks may be
// waiting for this one, and the end, which all must reach together, would never come.
class Session {
 public:
  static std::shared_ptr<Session> open() {
    static std::weak_ptr<Session> current;
    std::shared_ptr<Session> session = current.lock();
    if (!session) current = session = std::shared_ptr<Session>(new Session);
    return session;
  }

  ~Session() {
    if (owned_ && std::uncaught_exceptions() == 0) MPI_Finalize();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  Session() {
    int begun = 0, ended = 0, level = 0;
    check(MPI_Initialized(&begun), "MPI_Initialized");
    check(MPI_Finalized(&ended), "MPI_Finalized");
    WINNOW_CHECK(kOperation, ended == 0,
                 "MPI begins once in a process: keep a group as long as others are to follow");
    if (begun != 0) return;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    owned_ = true;
  }

  bool owned_ = false;
};

// `bytes` bytes whose neighbours of the same type lie `stride` bytes away.
class StridedBytes {
 public:
  StridedBytes(int bytes, std::int64_t stride) {
    MPI_Datatype piece = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(bytes, MPI_BYTE, &piece), "MPI_Type_contiguous");
    const int code = MPI_Type_create_resized(piece, 0, static_cast<MPI_Aint>(stride), &type_);
    MPI_Type_free(&piece);
    check(code, "MPI_Type_create_resized");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~StridedBytes() { MPI_Type_free(&type_); }
  StridedBytes(const StridedBytes&) = delete;
  StridedBytes& operator=(const StridedBytes&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

class MpiCommunicator final : public Communicator {
 public:
  // Takes `group`.
  MpiCommunicator(std::shared_ptr<Session> session, MPI_Comm group, std::int64_t message_bytes)
      : session_(std::move(session)), group_(group), message_bytes_(message_bytes) {
    check(MPI_Comm_set_errhandler(group_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_size(group_, &size_), "MPI_Comm_size");
    check(MPI_Comm_rank(group_, &rank_), "MPI_Comm_rank");
  }
  ~MpiCommunicator() override {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&group_);
  }
  std::int64_t size() const override { return size_; }
  std::int64_t rank() const override { return rank_; }

 private:
  // Calls body(first, bytes, type) for the pieces of a message of `bytes`, of which each rank has one;
  // `type` leads from a piece to the same one of the next rank's.
  template <class Body>
  void for_pieces(std::size_t bytes, const Body& body) {
    const auto all = static_cast<std::int64_t>(bytes);
    for (std::int64_t first = 0; first < all; first += message_bytes_) {
      const auto count = static_cast<int>(std::min(message_bytes_, all - first));
      body(first, count, StridedBytes(count, all).get());
    }
  }

  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    for_pieces(mine.size(), [&](std::int64_t first, int bytes, MPI_Datatype type) {
      check(
          MPI_Allgather(mine.data() + first, bytes, MPI_BYTE, all.data() + first, 1, type, group_),
          "MPI_Allgather");
    });
  }

  void do_all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    const std::size_t part = send.size() / static_cast<std::size_t>(size_);
    for_pieces(part, [&](std::int64_t first, int, MPI_Datatype type) {
      check(MPI_Alltoall(send.data() + first, 1, type, receive.data() + first, 1, type, group_),
            "MPI_Alltoall");
    });
  }

  void do_broadcast(std::span<std::byte> data, std::int64_t root) override {
    for_pieces(data.size(), [&](std::int64_t first, int bytes, MPI_Datatype) {
      check(MPI_Bcast(data.data() + first, bytes, MPI_BYTE, static_cast<int>(root), group_),
            "MPI_Bcast");
    });
  }

  void do_barrier() override { check(MPI_Barrier(group_), "MPI_Barrier"); }

  std::unique_ptr<Communicator> do_split(std::int64_t color, std::int64_t key) override {
    MPI_Comm part = MPI_COMM_NULL;
    check(MPI_Comm_split(group_, static_cast<int>(color), static_cast<int>(key), &part),
          "MPI_Comm_split");
    return std::make_unique<MpiCommunicator>(session_, part, message_bytes_);
  }

  std::shared_ptr<Session> session_;
  MPI_Comm group_;
  std::int64_t message_bytes_;
  int size_ = 0, rank_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> mpi_communicator(std::int64_t message_bytes) {
  WINNOW_CHECK(kOperation, message_bytes >= 1 && message_bytes <= kMessageBytes,
               "message_bytes must be from 1 to {}, got {}", kMessageBytes, message_bytes);
  std::shared_ptr<Session> session = Session::open();
  MPI_Comm world = MPI_COMM_NULL;
  check(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  return std::make_unique<MpiCommunicator>(std::move(session), world, message_bytes);
}

void mpi_abort(int status) {
  MPI_Abort(MPI_COMM_WORLD, status);
  std::_Exit(status);
}

const std::string& mpi_version() {
  static const std::string version = [] {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);
    const std::string all(text.data(), static_cast<std::size_t>(length));
    return all.substr(0, all.find(','));
  }();
  return version;
}

}  // namespace comm

std::unique_ptr<Communicator> mpi_communicator() {
  return comm::mpi_communicator(comm::kMessageBytes);
}

const std::string& mpi_refusal() {
  static const std::string none;
  return none;
}

}  // namespace winnow
