// Reader and writer of safetensors files: 8 bytes of header length (little-endian), a JSON header
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {text: text}}, data.
//
// Files that winnow writes have a checksum of each tensor among their metadata, and the reader
// compares it: a bit that flipped on the way is an error that names the tensor.
//
// The reader trusts nothing. Every broken rule is a winnow::Error (kCorrupt) that names file, rule
// and value; memory is asked for only by numbers that were checked against the size of the file.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/array.h"
#include "base/file.h"

namespace winnow::model {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;   // any rank; [] is a scalar
  std::uint64_t begin = 0, end = 0;  // bytes, counted from the first byte of data
  std::int64_t elements = 0;
};

class SafetensorsFile {
 public:
  // Reads and checks the header; data is read when asked for.
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // by position in file
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const SafetensorsEntry* find(const std::string& name) const;  // null if there is none

  // The tensor in its own dtype, rank 1 to 4 (a scalar comes as [1]).
  Array read(const std::string& name) const;
  // Into contiguous memory of the same dtype and shape.
  void read_into(const std::string& name, const Tensor& destination) const;
  // Reads all data and compares its checksums, as far as the file has them.
  void verify() const;

 private:
  const SafetensorsEntry& entry(const std::string& name) const;
  void read_bytes(const SafetensorsEntry& entry, void* destination) const;
  bool has_checksum(const SafetensorsEntry& entry) const;
  void compare_checksum(const SafetensorsEntry& entry, std::uint64_t found) const;

  std::filesystem::path path_;
  FileDescriptor file_;
  std::uint64_t data_begin_ = 0;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

struct NamedTensor {
  std::string name;
  Tensor tensor;  // contiguous
};

// With a checksum of each tensor. All or nothing: the file appears under its name once all of it is
// on the disk (base/file.h).
void write_safetensors(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace winnow::model
