#include "model/safetensors.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.h"

namespace winnow::model {
namespace {

constexpr const char* kOperation = "safetensors";
constexpr std::uint64_t kMaxHeader = 100'000'000;  // bytes; the format's own limit

constexpr const char* kChecksum = "winnow.checksum.";  // in the metadata, before a tensor's name

// Of a tensor's bytes. Every step is a bijection of the state, so what differs in one word alone
// always differs in the end.
class Checksum {
 public:
  explicit Checksum(std::uint64_t bytes) : state_(bytes) {}
  // Pieces of a whole number of words, but for the last.
  void add(const void* data, std::uint64_t bytes) {
    const char* next = static_cast<const char*>(data);
    for (; bytes >= 8; bytes -= 8, next += 8) add_word(next, 8);
    if (bytes > 0) add_word(next, bytes);
  }
  std::uint64_t value() const { return state_ ^ (state_ >> 32); }

 private:
  void add_word(const char* data, std::uint64_t bytes) {
    std::uint64_t word = 0;
    std::memcpy(&word, data, bytes);
    state_ = std::rotl((state_ ^ word) * 0x9e3779b97f4a7c15u, 29);
  }
  std::uint64_t state_;
};

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kDTypes[] = {
    {DType::kF64, "F64"}, {DType::kF32, "F32"},      {DType::kBF16, "BF16"},
    {DType::kF16, "F16"}, {DType::kI64, "I64"},      {DType::kI32, "I32"},
    {DType::kU8, "U8"},   {DType::kE4M3, "F8_E4M3"}, {DType::kE8M0, "F8_E8M0"},
};

template <class... A>
[[noreturn]] void corrupt(const std::filesystem::path& path, fmt::format_string<A...> rule,
                          A&&... values) {
  fail(Status::kCorrupt, kOperation, "{}: {}", path.string(),
       fmt::format(rule, std::forward<A>(values)...));
}

// Names come from the file: keep messages short and printable.
std::string shown(const std::string& text) {
  std::string out;
  for (char c : text.substr(0, 80)) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return "\"" + out + (text.size() > 80 ? "...\"" : "\"");
}

template <class T>
std::string list_text(const std::vector<T>& list) {
  std::string text;
  for (T x : list) text += (text.empty() ? "" : ", ") + std::to_string(x);
  return text;
}

// Takes the header's JSON event by event and accepts exactly the format, so that no tree is built
// of what a stranger wrote. Where: 1 inside the header, 2 inside a tensor or the metadata, 3 inside
// shape or data_offsets.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::filesystem::path& path, std::vector<SafetensorsEntry>& entries,
               std::map<std::string, std::string>& metadata)
      : path_(path), entries_(entries), metadata_(metadata) {}

  bool start_object(std::size_t) override {
    if (depth_ == 2 || in_array_) wrong("an object");
    ++depth_;
    return true;
  }
  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) finish_entry();
    --depth_;
    return true;
  }
  bool key(std::string& name) override {
    key_ = name;
    if (depth_ == 1) {
      if (!names_.emplace(name, true).second) corrupt(path_, "name {} appears twice", shown(name));
      in_metadata_ = name == "__metadata__";
      if (!in_metadata_) {
        entry_ = {};
        entry_.name = name;
        dtype_.reset();
        shape_.reset();
        offsets_.reset();
      }
    } else if (in_metadata_) {
      if (metadata_.contains(name)) corrupt(path_, "metadata {} appears twice", shown(name));
    } else if (name != "dtype" && name != "shape" && name != "data_offsets") {
      corrupt(path_, "tensor {} must have the keys dtype, shape, data_offsets only, got {}",
              shown(entry_.name), shown(name));
    } else if ((name == "dtype" && dtype_) || (name == "shape" && shape_) ||
               (name == "data_offsets" && offsets_)) {
      corrupt(path_, "tensor {} has {} twice", shown(entry_.name), name);
    }
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || in_array_ || key_ == "dtype") wrong("an array");
    in_array_ = true;
    (key_ == "shape" ? shape_ : offsets_).emplace();
    return true;
  }
  bool end_array() override {
    in_array_ = false;
    return true;
  }
  bool string(std::string& text) override {
    if (depth_ == 2 && in_metadata_) {
      metadata_[key_] = text;
    } else if (depth_ == 2 && key_ == "dtype" && !in_array_) {
      dtype_ = text;
    } else {
      wrong("text");
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) override {
    if (!in_array_) wrong("a number");
    std::vector<std::uint64_t>& list = *(key_ == "shape" ? shape_ : offsets_);
    if (key_ == "data_offsets" && list.size() == 2) wrong("a third number");
    list.push_back(value);
    return true;
  }
  bool number_integer(std::int64_t value) override { wrong(fmt::format("{}", value)); }
  bool number_float(double, const std::string& text) override { wrong(text); }
  bool null() override { wrong("null"); }
  bool boolean(bool) override { wrong("a truth value"); }
  bool binary(nlohmann::json::binary_t&) override { wrong("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    corrupt(path_, "the header must be valid JSON in UTF-8, but breaks at byte {}", position);
  }

 private:
  [[noreturn]] void wrong(const std::string& got) {
    if (depth_ == 0) corrupt(path_, "the header must be a JSON object, got {}", got);
    if (depth_ == 1) corrupt(path_, "entry {} must be an object, got {}", shown(key_), got);
    if (in_metadata_) corrupt(path_, "metadata {} must be text, got {}", shown(key_), got);
    corrupt(path_, "tensor {}: {} must be {}, got {}", shown(entry_.name), key_,
            key_ == "dtype"   ? "text"
            : key_ == "shape" ? "a list of whole numbers >= 0"
                              : "two whole numbers >= 0",
            got);
  }

  // Everything that one entry promises by itself.
  void finish_entry() {
    const std::string name = shown(entry_.name);
    if (!dtype_) corrupt(path_, "tensor {} has no dtype", name);
    if (!shape_) corrupt(path_, "tensor {} has no shape", name);
    if (!offsets_ || offsets_->size() != 2) {
      corrupt(path_, "tensor {} must have two data_offsets, got {}", name,
              offsets_ ? offsets_->size() : 0);
    }
    const auto* known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [&](const DTypeName& d) { return *dtype_ == d.name; });
    if (known == std::end(kDTypes)) {
      corrupt(path_, "tensor {} must be of dtype F64, F32, BF16, F16, I64, I32 or U8, got {}", name,
              shown(*dtype_));
    }
    entry_.dtype = known->dtype;
    constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    const auto element = static_cast<std::uint64_t>(dtype_bytes(entry_.dtype));
    std::uint64_t elements = 1;
    bool overflow = false, zero = false;
    for (std::uint64_t extent : *shape_) {
      overflow |= extent > kMax || (extent > 0 && elements > kMax / element / extent);
      zero |= extent == 0;
      if (extent > 0 && !overflow) elements *= extent;
      entry_.shape.push_back(static_cast<std::int64_t>(std::min(extent, kMax)));
    }
    if (overflow) {
      corrupt(path_, "tensor {}: the shape [{}] has more elements than 63 bits count", name,
              list_text(*shape_));
    }
    if (zero) elements = 0;
    entry_.elements = static_cast<std::int64_t>(elements);
    entry_.begin = (*offsets_)[0];
    entry_.end = (*offsets_)[1];
    if (entry_.begin > entry_.end || entry_.end - entry_.begin != elements * element) {
      corrupt(path_, "tensor {}: {} [{}] takes {} bytes, but data_offsets are [{}, {}]", name,
              *dtype_, list_text(*shape_), elements * element, entry_.begin, entry_.end);
    }
    entries_.push_back(std::move(entry_));
  }

  const std::filesystem::path& path_;
  std::vector<SafetensorsEntry>& entries_;
  std::map<std::string, std::string>& metadata_;
  std::map<std::string, bool> names_;
  std::string key_;
  SafetensorsEntry entry_;
  std::optional<std::string> dtype_;
  std::optional<std::vector<std::uint64_t>> shape_, offsets_;
  int depth_ = 0;
  bool in_metadata_ = false, in_array_ = false;
};

// `bytes` at `offset`; the caller has checked that the file was as long when it was opened.
void read_at(const std::filesystem::path& path, int fd, std::uint64_t offset, void* data,
             std::uint64_t bytes) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd, next, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      fail(Status::kIo, kOperation, "cannot read {}: {}", path.string(),
           std::generic_category().message(errno));
    }
    if (n == 0) corrupt(path, "the file became shorter while it was read");
    next += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::uint64_t>(n);
  }
}

Array make_array(const SafetensorsEntry& e) {
  const auto& s = e.shape;
  switch (s.size()) {
    case 0: return Array(e.dtype, {1});
    case 1: return Array(e.dtype, {s[0]});
    case 2: return Array(e.dtype, {s[0], s[1]});
    case 3: return Array(e.dtype, {s[0], s[1], s[2]});
    default: return Array(e.dtype, {s[0], s[1], s[2], s[3]});
  }
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::filesystem::path path)
    : path_(std::move(path)), file_(open_for_reading(kOperation, path_)) {
  const std::uint64_t size = file_size(kOperation, path_, file_.get());
  if (size < 8)
    corrupt(path_, "the file must hold at least 8 bytes of header length, got {}", size);
  std::uint8_t raw[8];
  read_at(path_, file_.get(), 0, raw, 8);
  std::uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | raw[i];
  if (header_bytes > kMaxHeader) {
    corrupt(path_, "the header must have at most {} bytes, got {}: this is no safetensors file",
            kMaxHeader, header_bytes);
  }
  if (header_bytes > size - 8) {
    corrupt(path_, "the header has {} bytes, but only {} follow its length: the file is cut short",
            header_bytes, size - 8);
  }
  std::string header(header_bytes, '\0');
  read_at(path_, file_.get(), 8, header.data(), header_bytes);
  if (header.empty() || header[0] != '{') {
    corrupt(path_, "the header must begin with '{{', got {}", shown(header.substr(0, 8)));
  }
  if (const std::size_t nul = header.find('\0'); nul != std::string::npos) {
    corrupt(path_, "the header must be valid JSON in UTF-8, but breaks at byte {}", nul);
  }
  HeaderReader reader(path_, entries_, metadata_);
  nlohmann::json::sax_parse(header, &reader);

  // The tensors must fill the data without gap or overlap.
  data_begin_ = 8 + header_bytes;
  const std::uint64_t data_bytes = size - data_begin_;
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t filled = 0;
  for (const SafetensorsEntry& e : entries_) {
    if (e.end > data_bytes) {
      corrupt(path_, "tensor {} ends at byte {} of the data, but the file has {}: it is cut short",
              shown(e.name), e.end, data_bytes);
    }
    if (e.begin != filled) {
      corrupt(path_, "tensor {} must begin where the one before it ends, at byte {}, got {}",
              shown(e.name), filled, e.begin);
    }
    filled = e.end;
    by_name_.emplace(e.name, by_name_.size());
  }
  if (filled != data_bytes) {
    corrupt(path_, "the tensors take {} bytes of data, but the file has {}", filled, data_bytes);
  }
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::entry(const std::string& name) const {
  const SafetensorsEntry* found = find(name);
  if (found == nullptr) corrupt(path_, "there is no tensor {}", shown(name));
  return *found;
}

void SafetensorsFile::read_bytes(const SafetensorsEntry& e, void* destination) const {
  const std::uint64_t bytes = e.end - e.begin;
  read_at(path_, file_.get(), data_begin_ + e.begin, destination, bytes);
  if (!has_checksum(e)) return;
  Checksum checksum(bytes);
  checksum.add(destination, bytes);
  compare_checksum(e, checksum.value());
}

bool SafetensorsFile::has_checksum(const SafetensorsEntry& e) const {
  return metadata_.contains(kChecksum + e.name);
}

void SafetensorsFile::compare_checksum(const SafetensorsEntry& e, std::uint64_t found) const {
  const std::string& known = metadata_.at(kChecksum + e.name);
  if (known == fmt::format("{:016x}", found)) return;
  corrupt(path_, "the data of tensor {} is not what was written: its checksum is {:016x}, not {}",
          shown(e.name), found, shown(known));
}

void SafetensorsFile::verify() const {
  std::vector<char> piece(std::size_t{1} << 20);
  for (const SafetensorsEntry& e : entries_) {
    if (!has_checksum(e)) continue;
    Checksum checksum(e.end - e.begin);
    for (std::uint64_t at = e.begin; at < e.end; at += piece.size()) {
      const std::uint64_t bytes = std::min<std::uint64_t>(piece.size(), e.end - at);
      read_at(path_, file_.get(), data_begin_ + at, piece.data(), bytes);
      checksum.add(piece.data(), bytes);
    }
    compare_checksum(e, checksum.value());
  }
}

Array SafetensorsFile::read(const std::string& name) const {
  const SafetensorsEntry& e = entry(name);
  if (e.shape.size() > kMaxRank) {
    fail(Status::kUnsupported, kOperation, "{}: tensor {} must have at most {} axes, got {}",
         path_.string(), shown(name), kMaxRank, e.shape.size());
  }
  Array array = make_array(e);
  read_bytes(e, array.view().data);
  return array;
}

void SafetensorsFile::read_into(const std::string& name, const Tensor& destination) const {
  const SafetensorsEntry& e = entry(name);
  WINNOW_CHECK(kOperation, destination.contiguous(), "the destination of {} must be contiguous",
               shown(name));
  const std::vector<std::int64_t> wanted(destination.shape.begin(),
                                         destination.shape.begin() + destination.rank);
  if (e.dtype != destination.dtype || e.shape != wanted) {
    corrupt(path_, "tensor {} must be {}, got {} [{}]", shown(name), shape_text(destination),
            dtype_name(e.dtype), list_text(e.shape));
  }
  read_bytes(e, destination.data);
}

void write_safetensors(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const NamedTensor& t : tensors) {
    WINNOW_CHECK(kOperation, t.tensor.rank > 0 && t.tensor.contiguous(),
                 "tensor {} must be contiguous and have at least one axis, got {}", shown(t.name),
                 shape_text(t.tensor));
    WINNOW_CHECK(kOperation, t.name != "__metadata__" && !header.contains(t.name),
                 "names must be unique and not __metadata__, got {} twice", shown(t.name));
    const auto bytes =
        static_cast<std::uint64_t>(t.tensor.elements() * dtype_bytes(t.tensor.dtype));
    const auto* dtype = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                     [&](const DTypeName& d) { return d.dtype == t.tensor.dtype; });
    header[t.name] = {{"dtype", dtype->name},
                      {"shape", std::vector<std::int64_t>(t.tensor.shape.begin(),
                                                          t.tensor.shape.begin() + t.tensor.rank)},
                      {"data_offsets", {offset, offset + bytes}}};
    Checksum checksum(bytes);
    checksum.add(t.tensor.data, bytes);
    header["__metadata__"][kChecksum + t.name] = fmt::format("{:016x}", checksum.value());
    offset += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::exception&) {
    fail(Status::kInvalidArgument, kOperation, "{}: names and metadata must be UTF-8",
         path.string());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins at a multiple of 8
  std::uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(text.size() >> (8 * i));

  AtomicFile file(kOperation, path);
  file.write(length, sizeof length);
  file.write(text.data(), text.size());
  for (const NamedTensor& t : tensors) {
    file.write(t.tensor.data,
               static_cast<std::size_t>(t.tensor.elements() * dtype_bytes(t.tensor.dtype)));
  }
  file.commit();
}

}  // namespace winnow::model
