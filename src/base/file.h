// Files read whole, and files written so that a reader sees the old content or the new, never half
// of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace winnow {

// A descriptor that closes itself.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  int get() const { return fd_; }
  void close();

 private:
  int fd_ = -1;
};

// "No space left on device: free some space or choose another output folder", from errno.
std::string system_reason(int error);

// Throws kIo, naming `operation`, where the path is missing, cannot be read or is no regular file: a
// folder, a pipe, a device.
FileDescriptor open_for_reading(const std::string& operation, const std::filesystem::path& path);
std::uint64_t file_size(const std::string& operation, const std::filesystem::path& path, int fd);
std::string read_file(const std::string& operation, const std::filesystem::path& path);

// Writes beside `path` and renames over it when all is on the disk. A writer that is destroyed
// before `commit`, or killed, leaves `path` as it was; a destroyed one also removes its own file.
class AtomicFile {
 public:
  AtomicFile(std::string operation, std::filesystem::path path);
  ~AtomicFile();
  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail_with(int error, const char* action);

  std::string operation_;
  std::filesystem::path path_, temporary_;
  FileDescriptor file_;
};

void write_file(const std::string& operation, const std::filesystem::path& path,
                const std::string& content);

// Creates the folder with its parents where it is missing.
void make_folder(const std::string& operation, const std::filesystem::path& path);
// Waits until the folder's own entries (names of files) are on the disk.
void sync_folder(const std::string& operation, const std::filesystem::path& path);

}  // namespace winnow
