#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/check.h"

namespace winnow {

FileDescriptor::~FileDescriptor() { close(); }

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void FileDescriptor::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

std::string system_reason(int error) {
  const char* advice = "";
  switch (error) {
    case ENOSPC:
    case EDQUOT: advice = ": free some space or choose another output folder"; break;
    case EACCES:
    case EPERM:
    case EROFS:
      advice = ": choose a folder that you may write to, or change its permissions";
      break;
    case ENOENT: advice = ": a folder of the path is missing; choose another path"; break;
    case ENOTDIR: advice = ": a part of the path is a file; choose another path"; break;
    case EFBIG: advice = ": raise the limit (ulimit -f) or choose another file system"; break;
    default: break;
  }
  return std::generic_category().message(error) + advice;
}

namespace {

// What lies under a path that is no regular file.
const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "a socket";
}

}  // namespace

FileDescriptor open_for_reading(const std::string& operation, const std::filesystem::path& path) {
  // Without O_NONBLOCK the opening of a pipe waits for a writer. Regular files do not know it.
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    fail(Status::kIo, operation, "cannot read {}: {}", path.string(),
         std::generic_category().message(errno));
  }
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) {
    fail(Status::kIo, operation, "cannot read {}: {}", path.string(),
         std::generic_category().message(errno));
  }
  if (!S_ISREG(status.st_mode)) {  // it may have no end, or none to wait for
    fail(Status::kIo, operation, "cannot read {}: it is {}, a file is needed{}", path.string(),
         kind_of(status.st_mode),
         S_ISDIR(status.st_mode) ? "" : "; write what it gives into a file and name that");
  }
  return file;
}

std::uint64_t file_size(const std::string& operation, const std::filesystem::path& path, int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_size < 0) {
    fail(Status::kIo, operation, "cannot read the size of {}: {}", path.string(),
         std::generic_category().message(errno));
  }
  return static_cast<std::uint64_t>(status.st_size);
}

std::string read_file(const std::string& operation, const std::filesystem::path& path) {
  const FileDescriptor file = open_for_reading(operation, path);
  std::string content;
  char piece[1 << 16];
  while (true) {
    const ssize_t n = ::read(file.get(), piece, sizeof piece);
    if (n == 0) return content;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      fail(Status::kIo, operation, "cannot read {}: {}", path.string(),
           std::generic_category().message(errno));
    }
    content.append(piece, static_cast<std::size_t>(n));
  }
}

AtomicFile::AtomicFile(std::string operation, std::filesystem::path path)
    : operation_(std::move(operation)), path_(std::move(path)) {
  temporary_ = path_;
  temporary_ += fmt::format(".{}.part", ::getpid());
  if (std::error_code ignored; std::filesystem::is_directory(path_, ignored)) {
    fail_with(EISDIR, "write");
  }
  file_ =
      FileDescriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.get() < 0) fail_with(errno, "create");
}

AtomicFile::~AtomicFile() {
  if (file_.get() >= 0) ::unlink(temporary_.c_str());
}

void AtomicFile::fail_with(int error, const char* action) {
  fail(Status::kIo, operation_, "cannot {} {}: {}", action, path_.string(), system_reason(error));
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(file_.get(), next, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_with(errno, "write");
    next += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) fail_with(errno, "write");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_with(errno, "write");
  file_.close();
  sync_folder(operation_, path_.parent_path());
}

void write_file(const std::string& operation, const std::filesystem::path& path,
                const std::string& content) {
  AtomicFile file(operation, path);
  file.write(content.data(), content.size());
  file.commit();
}

void make_folder(const std::string& operation, const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && !std::filesystem::is_directory(path, error)) {
    error = std::make_error_code(std::errc::not_a_directory);
  }
  if (error) {
    fail(Status::kIo, operation, "cannot create the folder {}: {}", path.string(),
         system_reason(error.value()));
  }
}

void sync_folder(const std::string& operation, const std::filesystem::path& path) {
  const std::filesystem::path folder = path.empty() ? "." : path;
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder and say EINVAL; they order names themselves.
  if (fd.get() < 0 || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
    fail(Status::kIo, operation, "cannot write the folder {}: {}", folder.string(),
         system_reason(errno));
  }
}

}  // namespace winnow
