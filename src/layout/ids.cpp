#include "winnow/ids.h"

#include <algorithm>
#include <limits>

#include "base/check.h"

namespace winnow {
namespace {

constexpr std::int64_t kMaxId = std::numeric_limits<std::int32_t>::max() - 1;

std::int64_t number(const Tensor& t, std::int64_t row) {
  return t.as<std::int32_t>()[row * t.strides[0]];
}

void check_ids(const char* name, const Tensor& ids, std::int64_t rows, std::int64_t topk) {
  check_host("ids", name, ids);
  check_shape("ids", name, ids, {rows, topk}, "[rows, topk]");
  check_dtype("ids", name, ids, {DType::kI32});
  WINNOW_CHECK("ids", ids.data != nullptr || ids.elements() == 0, "{} must have data, got null",
               name);
}

// out[i, s] = convert(i, in[i, s]); an answer that is no id becomes -1.
template <class Convert>
void for_each_id(const Tensor& in, const Tensor& out, Convert&& convert) {
  check_ids("ids", in, -1, -1);
  check_ids("out", out, in.shape[0], in.shape[1]);
  if (in.data != out.data || in.strides != out.strides) {
    check_no_overlap("ids", "out", out, "ids", in);
  }
  for (std::int64_t i = 0; i < in.shape[0]; ++i) {
    for (std::int64_t s = 0; s < in.shape[1]; ++s) {
      const std::int64_t id = in.as<std::int32_t>()[i * in.strides[0] + s * in.strides[1]];
      const std::int64_t to = id < 0 ? -1 : convert(i, id);
      out.as<std::int32_t>()[i * out.strides[0] + s * out.strides[1]] =
          static_cast<std::int32_t>(to < 0 || to > kMaxId ? -1 : to);
    }
  }
}

void check_rows(const RequestRows& rows, const Tensor& ids, const Tensor& out) {
  const std::int64_t count = ids.rank > 0 ? ids.shape[0] : 0;
  for (const auto& [name, t] : {std::pair{"base", rows.base}, std::pair{"length", rows.length}}) {
    check_host("ids", name, t);
    check_shape("ids", name, t, {count}, "[rows]");
    check_dtype("ids", name, t, {DType::kI32});
    WINNOW_CHECK("ids", t.data != nullptr || count == 0, "{} must have data, got null", name);
    check_no_overlap("ids", "out", out, name, t);
  }
}

void check_shard(const Shard& s) {
  WINNOW_CHECK("ids", s.ranks >= 1 && s.rank >= 0 && s.rank < s.ranks,
               "rank must be from 0 to ranks - 1, got {} of {}", s.rank, s.ranks);
  WINNOW_CHECK("ids", s.interleave >= 1, "interleave must be at least 1, got {}", s.interleave);
}

}  // namespace

void convert_ids(const KeyIds& ids, const RequestRows& rows, const RequestIds& out) {
  check_rows(rows, ids.ids, out.ids);
  for_each_id(ids.ids, out.ids, [&](std::int64_t row, std::int64_t id) {
    const std::int64_t position = id - number(rows.base, row);
    return position < number(rows.length, row) ? position : -1;
  });
}

void convert_ids(const RequestIds& ids, const RequestRows& rows, const KeyIds& out) {
  check_rows(rows, ids.ids, out.ids);
  for_each_id(ids.ids, out.ids, [&](std::int64_t row, std::int64_t position) {
    return position < number(rows.length, row) ? number(rows.base, row) + position : -1;
  });
}

std::int64_t shard_length(const Shard& shard, std::int64_t length) {
  check_shard(shard);
  const std::int64_t round = shard.interleave * shard.ranks;
  const std::int64_t rest = length % round - shard.rank * shard.interleave;
  return length / round * shard.interleave + std::clamp(rest, std::int64_t{0}, shard.interleave);
}

void to_shard(const RequestIds& ids, const Shard& shard, const RequestIds& out) {
  check_shard(shard);
  const std::int64_t part = shard.interleave;
  for_each_id(ids.ids, out.ids, [&](std::int64_t, std::int64_t j) {
    return j / part % shard.ranks == shard.rank ? j / (part * shard.ranks) * part + j % part : -1;
  });
}

void from_shard(const RequestIds& ids, const Shard& shard, const RequestIds& out) {
  check_shard(shard);
  const std::int64_t part = shard.interleave;
  for_each_id(ids.ids, out.ids, [&](std::int64_t, std::int64_t j) {
    return (j / part * shard.ranks + shard.rank) * part + j % part;
  });
}

}  // namespace winnow
