// The engine for GPUs: one rank of a group drives one GPU. NCCL moves bytes; like MPI it is never
// asked to add, since its order is open.
#include "comm/nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <exception>

#include "base/check.h"
#include "base/device.h"
#include "winnow/communicator.h"

namespace winnow {
namespace {

constexpr const char* kOperation = "nccl";

void check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  fail(Status::kDevice, kOperation, "{} must succeed, got: {} ({})", call,
       ncclGetErrorString(result), ncclGetLastError(nullptr));
}

class NcclCommunicator final : public Communicator {
 public:
  // `host` has the same ranks: it carries the name under which NCCL's ranks find each other, and
  // makes the groups that this one is split into.
  NcclCommunicator(std::unique_ptr<Communicator> host, Device device, Stream stream)
      : host_(std::move(host)), device_(device), stream_(stream) {
    const DeviceScope scope(device_);
    ncclUniqueId name{};
    if (host_->rank() == 0) check(ncclGetUniqueId(&name), "ncclGetUniqueId");
    host_->broadcast(std::as_writable_bytes(std::span(&name, 1)), 0);
    check(ncclCommInitRank(&group_, static_cast<int>(host_->size()), name,
                           static_cast<int>(host_->rank())),
          "ncclCommInitRank");
  }
  // What is queued is done first. While an exception is on its way out nobody is waited for.
  ~NcclCommunicator() override {
    if (group_ == nullptr) return;
    if (std::uncaught_exceptions() > 0) {
      ncclCommAbort(group_);
    } else {
      ncclCommDestroy(group_);
    }
  }
  std::int64_t size() const override { return host_->size(); }
  std::int64_t rank() const override { return host_->rank(); }
  Device device() const override { return device_; }
  Stream stream() const override { return stream_; }

 private:
  cudaStream_t queue() const { return static_cast<cudaStream_t>(stream_.handle); }

  void do_all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const DeviceScope scope(device_);
    check(ncclAllGather(mine.data(), all.data(), mine.size(), ncclUint8, group_, queue()),
          "ncclAllGather");
  }

  void do_all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    const DeviceScope scope(device_);
    const std::size_t part = send.size() / static_cast<std::size_t>(size());
    check(ncclGroupStart(), "ncclGroupStart");
    for (int r = 0; r < static_cast<int>(size()); ++r) {
      const std::size_t first = static_cast<std::size_t>(r) * part;
      check(ncclSend(send.data() + first, part, ncclUint8, r, group_, queue()), "ncclSend");
      check(ncclRecv(receive.data() + first, part, ncclUint8, r, group_, queue()), "ncclRecv");
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

  void do_broadcast(std::span<std::byte> data, std::int64_t root) override {
    const DeviceScope scope(device_);
    check(ncclBroadcast(data.data(), data.data(), data.size(), ncclUint8, static_cast<int>(root),
                        group_, queue()),
          "ncclBroadcast");
  }

  void do_barrier() override {
    synchronise(device_);
    host_->barrier();
  }

  std::unique_ptr<Communicator> do_split(std::int64_t color, std::int64_t key) override {
    return std::make_unique<NcclCommunicator>(host_->split(color, key), device_, stream_);
  }

  std::unique_ptr<Communicator> host_;
  Device device_;
  Stream stream_;
  ncclComm_t group_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> nccl_communicator(Communicator& host, Device device, Stream stream) {
  WINNOW_CHECK(kOperation, nccl_refusal().empty(), "{}", nccl_refusal());
  WINNOW_CHECK(kOperation,
               device.kind == Device::Kind::kCuda && device.index >= 0 &&
                   device.index < static_cast<int>(cuda_devices().size()),
               "device must be one of the {} GPUs of this machine, got {}", cuda_devices().size(),
               device_text(device));
  return std::make_unique<NcclCommunicator>(host.split(0, host.rank()), device, stream);
}

const std::string& nccl_refusal() { return cuda_refusal(); }

namespace comm {

const std::string& nccl_version() {
  static const std::string version = [] {
    int number = 0;  // 22407: 2.24.7
    if (ncclGetVersion(&number) != ncclSuccess) return std::string("unknown");
    return fmt::format("NCCL {}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  }();
  return version;
}

}  // namespace comm
}  // namespace winnow
