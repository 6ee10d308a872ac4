#include "apps/winnow/golden_reader.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/numbers.h"

namespace winnow::app {
namespace {

nlohmann::json meta(const model::SafetensorsFile& file, const std::string& name) {
  const auto it = file.metadata().find(name);
  nlohmann::json value = it == file.metadata().end()
                             ? nlohmann::json(nlohmann::json::value_t::discarded)
                             : nlohmann::json::parse(it->second, nullptr, false);
  if (value.is_discarded())
    fail(Status::kCorrupt, "golden", "the metadata must hold \"{}\" as JSON", name);
  return value;
}

void meta_rule(bool holds, const std::string& name, const char* kind, const nlohmann::json& value) {
  if (!holds)
    fail(Status::kCorrupt, "golden", "the metadata's \"{}\" must be {}, got {}", name, kind,
         value.dump());
}

Array zeros(DType dtype, const std::vector<std::int64_t>& shape) {
  switch (shape.size()) {
    case 1: return {dtype, {shape[0]}};
    case 2: return {dtype, {shape[0], shape[1]}};
    default: return {dtype, {shape[0], shape[1], shape[2]}};
  }
}

}  // namespace

void GoldenReader::rule(bool holds, const std::string& text, const Tensor& t) {
  if (!holds) fail(Status::kCorrupt, "golden", "{}, got {}", text, shape_text(t));
}

Array GoldenReader::slice(const std::string& name, int axis, std::int64_t e,
                          std::initializer_list<std::int64_t> first, DType dtype) const {
  const Array whole = file_.read(name);
  const Tensor& t = whole;
  bool ok = t.rank >= 2 && t.rank >= static_cast<int>(first.size());
  std::string wanted;
  int at = 0;
  for (const std::int64_t extent : first) {
    ok = ok && (extent < 0 || t.shape[at] == extent);
    wanted += (at++ > 0 ? ", " : "") + (extent < 0 ? std::string("any") : std::to_string(extent));
  }
  rule(ok, fmt::format("{} must be [{}, ...]", name, wanted), t);
  rule(is_float(dtype) ? is_float(t.dtype) : t.dtype == dtype,
       fmt::format("{} must be {}", name, is_float(dtype) ? "floating" : dtype_name(dtype)), t);
  rule(e >= 0 && e < t.shape[axis], fmt::format("{} must have an element {}", name, e), t);

  std::vector<std::int64_t> shape;
  for (int i = 0; i < t.rank; ++i) {
    if (i != axis) shape.push_back(t.shape[i]);
  }
  Array out = zeros(dtype, shape);
  const std::int64_t before = axis == 0 ? 1 : t.shape[0];
  const std::int64_t behind = out.elements() / std::max<std::int64_t>(1, before);
  const std::int64_t size = dtype_bytes(dtype);
  for (std::int64_t i = 0; i < before; ++i) {
    const std::int64_t from = (i * t.shape[axis] + e) * behind;
    if (!is_float(dtype)) {
      std::memcpy(out.as<char>() + i * behind * size, t.as<char>() + from * size,
                  static_cast<std::size_t>(behind * size));
      continue;
    }
    for (std::int64_t r = 0; r < behind; ++r)
      store_double(out.view().data, dtype, i * behind + r, element(t, from + r));
  }
  return out;
}

double GoldenReader::number(const std::string& name) const {
  const Array whole = file_.read(name);
  rule(whole.elements() == 1 && is_float(whole.view().dtype), name + " must be one number", whole);
  return element(whole, 0);
}

std::int64_t GoldenReader::meta_whole(const std::string& name) const {
  const nlohmann::json value = meta(file_, name);
  meta_rule(value.is_number_integer(), name, "a whole number", value);
  return value.get<std::int64_t>();
}

double GoldenReader::meta_real(const std::string& name) const {
  const nlohmann::json value = meta(file_, name);
  meta_rule(value.is_number(), name, "a number", value);
  return value.get<double>();
}

bool GoldenReader::meta_flag(const std::string& name) const {
  const nlohmann::json value = meta(file_, name);
  meta_rule(value.is_boolean(), name, "true or false", value);
  return value.get<bool>();
}

bool GoldenReader::meta_null(const std::string& name) const { return meta(file_, name).is_null(); }

double element(const Tensor& t, std::int64_t i) { return load_double(t.data, t.dtype, i); }

}  // namespace winnow::app
