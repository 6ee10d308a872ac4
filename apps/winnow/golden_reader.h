// A file of golden vectors: tensors, batch element by batch element, and metadata. A broken rule is
// an error (kCorrupt) that names the tensor, the rule and what was found.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>

#include "base/array.h"
#include "model/safetensors.h"

namespace winnow::app {

class GoldenReader {
 public:
  explicit GoldenReader(const std::filesystem::path& path) : file_(path) {}

  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  Array read(const std::string& name) const { return file_.read(name); }

  // Element e of axis `axis` (0 or 1), without that axis. The tensor begins with the axes `first`
  // (-1: any extent). Floating numbers are converted to `dtype`; others must have it.
  Array slice(const std::string& name, int axis, std::int64_t e,
              std::initializer_list<std::int64_t> first, DType dtype) const;
  // A tensor of one floating number.
  double number(const std::string& name) const;

  // Metadata, which are JSON.
  std::int64_t meta_whole(const std::string& name) const;
  double meta_real(const std::string& name) const;
  bool meta_flag(const std::string& name) const;
  bool meta_null(const std::string& name) const;

  // Throws unless the rule holds for the tensor.
  static void rule(bool holds, const std::string& text, const Tensor& t);

 private:
  model::SafetensorsFile file_;
};

// Element i of a contiguous tensor.
double element(const Tensor& t, std::int64_t i);

}  // namespace winnow::app
