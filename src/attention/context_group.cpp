#include "attention/context_group.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "base/check.h"
#include "base/hash.h"
#include "comm/collectives.h"
#include "nn/rows.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "context_parallel";

// Bytes of one row of a contiguous tensor.
std::int64_t row_bytes(const Tensor& t) {
  std::int64_t elements = 1;
  for (int axis = 1; axis < t.rank; ++axis) elements *= t.shape[static_cast<std::size_t>(axis)];
  return elements * dtype_bytes(t.dtype);
}

std::span<std::byte> bytes_of(const Tensor& t) {
  return {t.as<std::byte>(), static_cast<std::size_t>(t.elements() * dtype_bytes(t.dtype))};
}

// A rank's part and the rows of all ranks: the same, but for how many there are.
void check_alike(const Tensor& mine, std::int64_t rows, const Tensor& all, std::int64_t keys) {
  WINNOW_CHECK(kName,
               mine.contiguous() && all.contiguous() && mine.rank >= 1 && mine.rank == all.rank &&
                   mine.shape[0] == rows && all.shape[0] == keys && mine.dtype == all.dtype &&
                   row_bytes(mine) == row_bytes(all),
               "a rank's part and the rows of all must be alike, contiguous and of {} and {} rows, "
               "got {} and {}",
               rows, keys, shape_text(mine), shape_text(all));
}

}  // namespace

ContextGroup::ContextGroup(Communicator& ranks, ContextTables tables, std::int64_t exchange_bytes)
    : ranks_(ranks), tables_(std::move(tables)), exchange_bytes_(exchange_bytes) {
  const ContextGeometry& g = tables_.geometry();
  WINNOW_CHECK(kName, g.cp_size == ranks.size() && g.cp_rank == ranks.rank(),
               "tables of rank {} of {} cannot serve rank {} of {}", g.cp_rank, g.cp_size,
               ranks.rank(), ranks.size());
  WINNOW_CHECK(
      kName, ranks.device().kind == Device::Kind::kCpu,
      "layers run on CPUs, and so must their ranks exchange (mpi_communicator), got a group on {}",
      device_text(ranks.device()));
}

void ContextGroup::check_agreement() const {
  struct Part {
    std::int64_t rows = 0;
    std::uint64_t sequences = kHashBegin;  // of their boundaries
  };
  Part mine;
  mine.rows = rows();
  for (const std::int64_t boundary : tables_.cu_seqlens()) {
    mine.sequences = hash_with(mine.sequences, static_cast<std::uint64_t>(boundary));
  }
  std::vector<Part> all(static_cast<std::size_t>(ranks_.size()));
  comm::all_gather(ranks_, std::span<const Part>(&mine, 1), std::span(all));
  std::string rows;
  bool same_rows = true, same_sequences = true;
  for (const Part& part : all) {
    rows += fmt::format("{}{}", rows.empty() ? "" : ", ", part.rows);
    same_rows = same_rows && part.rows == all[0].rows;
    same_sequences = same_sequences && part.sequences == all[0].sequences;
  }
  WINNOW_CHECK(kName, same_rows,
               "every rank must hold as many rows, padding included, got {}: cut "
               "the batch with one number of local rows",
               rows);
  WINNOW_CHECK(kName, same_sequences,
               "the {} ranks must hold parts of the same sequences, and their boundaries differ: "
               "cut one batch on all of them",
               ranks_.size());
}

void ContextGroup::gather(const Tensor& mine, const Tensor& all, Buffer& exchanged) const {
  check_alike(mine, rows(), all, keys());
  const std::int64_t bytes = row_bytes(mine), most = rows_at_once(bytes), ranks = ranks_.size();
  if (bytes == 0) return;
  for (std::int64_t first = 0; first < rows(); first += most) {
    const std::int64_t count = std::min(most, rows() - first);
    const Tensor& received = exchanged.fit(DType::kU8, {ranks * count, bytes});
    ranks_.all_gather(bytes_of(mine.rows(first, count)), bytes_of(received));
    nn::for_rows(ranks * count, [&](std::int64_t i) {
      std::memcpy(all.as<std::byte>() + position(i / count, first + i % count) * bytes,
                  received.as<std::byte>() + i * bytes, static_cast<std::size_t>(bytes));
    });
  }
}

void ContextGroup::scatter_sum(const Tensor& all, const Tensor& mine, Buffer& exchanged) const {
  check_alike(mine, rows(), all, keys());
  const std::int64_t bytes = row_bytes(mine), most = rows_at_once(bytes), ranks = ranks_.size();
  if (bytes == 0) return;
  for (std::int64_t first = 0; first < rows(); first += most) {
    const std::int64_t count = std::min(most, rows() - first);
    const Tensor& sent = exchanged.fit(DType::kU8, {ranks * count, bytes});
    nn::for_rows(ranks * count, [&](std::int64_t i) {
      std::memcpy(sent.as<std::byte>() + i * bytes,
                  all.as<std::byte>() + position(i / count, first + i % count) * bytes,
                  static_cast<std::size_t>(bytes));
    });
    const Tensor part = mine.rows(first, count);
    nn::with_real(mine.dtype, [&]<class T>(T) {
      const auto size = static_cast<std::size_t>(part.elements());
      comm::reduce_scatter_sum(
          ranks_, std::span<const T>(sent.as<T>(), size * static_cast<std::size_t>(ranks)),
          std::span<T>(part.as<T>(), size));
    });
  }
}

// As many on every rank: they have the same rows.
std::int64_t ContextGroup::rows_at_once(std::int64_t row_bytes) const {
  return std::max<std::int64_t>(
      1, exchange_bytes_ / std::max<std::int64_t>(1, row_bytes * ranks_.size()));
}

}  // namespace winnow::attention
