// The file format: what is written comes back, what is broken is refused by rule and value, and a
// file is whole or not there.
#include "model/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <cstring>

#include "tests/files.h"

namespace winnow::model {
namespace {

namespace fs = std::filesystem;

class Safetensors : public FolderTest {
 protected:
  std::filesystem::path write_raw(const std::string& content) const {
    return write("raw.safetensors", content);
  }
};

std::string length_bytes(std::uint64_t n) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(n >> (8 * i));
  return bytes;
}

std::string file_of(const std::string& header, std::size_t data_bytes) {
  return length_bytes(header.size()) + header + std::string(data_bytes, 'x');
}

TEST_F(Safetensors, EveryDtypeAndRankComesBackBitForBit) {
  std::vector<Array> arrays;
  std::vector<NamedTensor> tensors;
  int seed = 1;
  for (DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI64, DType::kI32,
                      DType::kU8, DType::kE4M3, DType::kE8M0}) {
    arrays.push_back(Array(dtype, {3}));
    arrays.push_back(Array(dtype, {2, 0}));
    arrays.push_back(Array(dtype, {2, 1, 3}));
    arrays.push_back(Array(dtype, {1, 5, 1, 2}));
  }
  for (const Array& a : arrays) {
    auto* bytes = a.as<unsigned char>();
    for (std::int64_t i = 0; i < a.bytes(); ++i) {
      bytes[i] = static_cast<unsigned char>(seed = (seed * 1103 + 77) & 0xffff);
    }
    tensors.push_back({fmt::format("tensor.{}", tensors.size()), a});
  }
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, tensors, {{"step", "17"}, {"text", "a \"quoted\" line\n"}});

  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata().at("step"), "17");
  EXPECT_EQ(file.metadata().at("text"), "a \"quoted\" line\n");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const Array back = file.read(t.name);
    EXPECT_EQ(back.view().dtype, t.tensor.dtype);
    ASSERT_EQ(back.view().rank, t.tensor.rank);
    EXPECT_EQ(back.view().shape, t.tensor.shape);
    EXPECT_EQ(std::memcmp(back.view().data, t.tensor.data, static_cast<std::size_t>(back.bytes())),
              0);
    Array into = back.clone();
    into.zero();
    file.read_into(t.name, into);
    EXPECT_EQ(std::memcmp(into.view().data, t.tensor.data, static_cast<std::size_t>(back.bytes())),
              0);
  }
  EXPECT_EQ(files(), 1);  // no temporary file is left
}

TEST_F(Safetensors, FilesOfOtherWritersAreRead) {
  // A header of odd length, entries not in the order of the data, a scalar, five axes.
  const std::string header = R"({"b":{"dtype":"I32","shape":[1,1,1,1,1],"data_offsets":[8,12]},)"
                             R"("a":{"shape":[],"data_offsets":[0,8],"dtype":"F64"}} )";
  const SafetensorsFile file(write_raw(file_of(header, 12)));
  EXPECT_EQ(file.entries()[0].name, "a");
  EXPECT_EQ(file.read("a").elements(), 1);
  EXPECT_EQ(file.find("b")->shape.size(), 5u);
  EXPECT_TRUE(has(error_of(Status::kUnsupported, [&] { file.read("b"); }), "at most 4 axes"));
}

struct Hostile {
  const char* name;
  std::string content;
  const char* rule;
};

std::vector<Hostile> hostile_files() {
  const auto tensor = [](const std::string& fields, std::size_t data = 8) {
    return file_of("{\"t\":{" + fields + "}}", data);
  };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::string whole = tensor(good);
  return {
      {"empty", "", "at least 8 bytes of header length, got 0"},
      {"five_bytes", "abcde", "at least 8 bytes of header length, got 5"},
      {"text_file", "In the beginning God created", "this is no safetensors file"},
      {"huge_header", length_bytes(~0ull) + "{}", "at most 100000000 bytes"},
      {"header_of_100_MB_missing", length_bytes(100'000'000) + "{}", "cut short"},
      {"header_one_byte_short", length_bytes(3) + "{}", "cut short"},
      {"no_header", length_bytes(0), "must begin with '{'"},
      {"array_header", file_of("[1]", 0), "must begin with '{'"},
      {"leading_space", file_of(" {}", 0), "must begin with '{'"},
      {"broken_json", file_of("{\"t\":", 0), "valid JSON"},
      {"trailing_garbage", file_of("{}garbage", 0), "valid JSON"},
      {"trailing_nul", file_of(std::string("{}\0", 3), 0), "valid JSON"},
      {"not_utf8", file_of("{\"\xff\":{" + good + "}}", 8), "valid JSON"},
      {"deep_nesting", file_of("{\"t\":" + std::string(100'000, '['), 0), "must be an object"},
      {"deep_shape", tensor("\"shape\":" + std::string(50'000, '[')), "list of whole numbers"},
      {"entry_is_number", file_of(R"({"t":3})", 0), "must be an object, got a number"},
      {"metadata_is_text", file_of(R"({"__metadata__":"x"})", 0), "must be an object, got text"},
      {"metadata_number", file_of(R"({"__metadata__":{"step":3}})", 0), "must be text"},
      {"metadata_object", file_of(R"({"__metadata__":{"a":{}}})", 0), "must be text"},
      {"duplicate_name", file_of("{\"t\":{" + good + "},\"t\":{" + good + "}}", 8), "twice"},
      {"duplicate_key", tensor(R"("dtype":"F32","dtype":"I32")"), "dtype twice"},
      {"unknown_key", tensor(good + R"(,"strides":[1])"), "got \"strides\""},
      {"no_dtype", tensor(R"("shape":[2],"data_offsets":[0,8])"), "has no dtype"},
      {"no_shape", tensor(R"("dtype":"F32","data_offsets":[0,8])"), "has no shape"},
      {"no_offsets", tensor(R"("dtype":"F32","shape":[2])"), "two data_offsets, got 0"},
      {"one_offset", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8])"), "got 1"},
      {"three_offsets", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), "third"},
      {"unknown_dtype", tensor(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), "got \"F33\""},
      {"dtype_number", tensor(R"("dtype":32)"), "dtype must be text"},
      {"dtype_list", tensor(R"("dtype":["F32"])"), "dtype must be text"},
      {"negative_extent", tensor(R"("dtype":"F32","shape":[-2])"), "got -2"},
      {"fraction_extent", tensor(R"("dtype":"F32","shape":[2.5])"), "got 2.5"},
      {"null_extent", tensor(R"("dtype":"F32","shape":[null])"), "got null"},
      {"extent_beyond_64_bits", tensor(R"("dtype":"F32","shape":[18446744073709551617])"),
       "whole numbers"},
      {"extent_beyond_63_bits",
       tensor(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,8])"), "63 bits"},
      {"product_overflows_to_8",  // 2^33 * 2^31 * 4 bytes = 2^66: 0 in 64 bits
       tensor(R"("dtype":"F32","shape":[8589934592,2147483648],"data_offsets":[0,0])", 0),
       "63 bits"},
      {"huge_allocation",
       tensor(R"("dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104])"),
       "cut short"},
      {"wrong_size", tensor(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), "takes 12 bytes"},
      {"offsets_swapped", tensor(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "[8, 0]"},
      {"offsets_wrap",
       tensor(R"("dtype":"U8","shape":[8],"data_offsets":[18446744073709551612,4])"), "takes 8"},
      {"data_cut", whole.substr(0, whole.size() - 1), "cut short"},
      {"data_too_long", whole + "x", "take 8 bytes of data, but the file has 9"},
      {"gap_at_begin", tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
       "at byte 0, got 4"},
      {"overlap",
       file_of(R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},)"
               R"("b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}})",
               8),
       "at byte 6, got 2"},
      {"same_place",
       file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
               R"("b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
               8),
       "at byte 8, got 0"},
  };
}

TEST_F(Safetensors, HostileFilesAreRefusedByRuleAndValue) {
  for (const Hostile& file : hostile_files()) {
    SCOPED_TRACE(file.name);
    const fs::path path = write_raw(file.content);
    const std::string message = error_of(Status::kCorrupt, [&] { SafetensorsFile{path}; });
    EXPECT_TRUE(has(message, file.rule));
    EXPECT_TRUE(has(message, path.string()));
    EXPECT_EQ(message.rfind("[safetensors] ", 0), 0u);
  }
}

TEST_F(Safetensors, EveryTruncationOfAGoodFileIsRefused) {
  Array a(DType::kF32, {2, 3}), b(DType::kU8, {5});
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, {{"a", a}, {"b", b}}, {{"k", "v"}});
  const std::string whole = read(path);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    const fs::path cut = write_raw(whole.substr(0, n));
    error_of(Status::kCorrupt, [&] { SafetensorsFile{cut}; });
  }
}

TEST_F(Safetensors, EveryFlippedByteIsRefusedOrReadWithoutHarm) {
  Array a(DType::kF32, {2, 3}), b(DType::kU8, {5});
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, {{"a", a}, {"b", b}}, {{"k", "v"}});
  const std::string whole = read(path);
  for (std::size_t n = 0; n < whole.size(); ++n) {
    for (int mask : {0x01, 0x10, 0x80, 0xff}) {
      std::string broken = whole;
      broken[n] = static_cast<char>(broken[n] ^ mask);
      try {
        const SafetensorsFile file(write_raw(broken));
        for (const SafetensorsEntry& e : file.entries()) file.read(e.name);
      } catch (const Error& error) {
        EXPECT_EQ(error.status(), Status::kCorrupt) << error.what();
      }
    }
  }
}

TEST_F(Safetensors, WhatIsNotThereIsNamed) {
  Array a(DType::kF32, {2, 3});
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, {{"a", a}});
  const SafetensorsFile file(path);
  EXPECT_TRUE(has(error_of(Status::kCorrupt, [&] { file.read("b"); }), "no tensor \"b\""));
  Array other(DType::kF32, {3, 2});
  EXPECT_TRUE(has(error_of(Status::kCorrupt, [&] { file.read_into("a", other); }),
                  "must be f32 [3, 2], got f32 [2, 3]"));
  EXPECT_TRUE(
      has(error_of(Status::kIo, [&] { SafetensorsFile(folder_ / "missing"); }), "No such file"));
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { SafetensorsFile{folder_}; }), "is a folder"));
}

TEST_F(Safetensors, WriterRefusesBadNames) {
  Array a(DType::kF32, {2});
  const fs::path path = folder_ / "a.safetensors";
  const auto refused = [&](const std::vector<NamedTensor>& tensors) {
    return error_of(Status::kInvalidArgument, [&] { write_safetensors(path, tensors); });
  };
  EXPECT_TRUE(has(refused({{"a", a}, {"a", a}}), "unique"));
  EXPECT_TRUE(has(refused({{"__metadata__", a}}), "unique"));
  EXPECT_TRUE(has(refused({{"\xff", a}}), "UTF-8"));
  EXPECT_TRUE(has(refused({{"a", Tensor{}}}), "one axis"));
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Safetensors, FolderThatCannotBeWrittenToIsAnErrorThatSaysWhatToDo) {
  Array a(DType::kF32, {2});
  const auto refused = [&](const fs::path& path) {
    return error_of(Status::kIo, [&] { write_safetensors(path, {{"a", a}}); });
  };
  write("file", "x");
  EXPECT_TRUE(has(refused(folder_ / "file" / "a"), "choose another path"));
  EXPECT_TRUE(has(refused("/proc/winnow.safetensors"), "/proc/winnow.safetensors"));
  EXPECT_TRUE(has(refused(folder_ / "none" / "a"), "No such file"));
  fs::create_directory(folder_ / "taken");
  EXPECT_TRUE(has(refused(folder_ / "taken"), "Is a directory"));
  EXPECT_EQ(files(), 2);
}

TEST_F(Safetensors, FullDiskLeavesTheOldFileAndNothingElse) {
  if (::mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "needs the right to mount a small file system";
  }
  Array small(DType::kF32, {16}), large(DType::kF32, {1 << 16});
  small.as<float>()[0] = 5;
  const fs::path path = folder_ / "a.safetensors";
  write_safetensors(path, {{"a", small}});
  const std::string message = error_of(Status::kIo, [&] {
    write_safetensors(path, {{"a", large}});
  });
  EXPECT_TRUE(has(message, "free some space"));
  EXPECT_EQ(SafetensorsFile(path).read("a").as<float>()[0], 5);
  EXPECT_EQ(files(), 1);
  ::umount(folder_.c_str());
}

}  // namespace
}  // namespace winnow::model
