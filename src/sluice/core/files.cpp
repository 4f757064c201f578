// SPDX-License-Identifier: Apache-2.0
#include "sluice/core/files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <cassert>
#include <cerrno>
#include <cstring>

#include "sluice/core/error.h"

namespace sluice {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail_io(std::string_view what, const fs::path& path, int error) {
  const auto code =
      error == ENOENT || error == EACCES || error == EISDIR || error == ENOTDIR ? ExitCode::kData : ExitCode::kRuntime;
  const auto advice = error == ENOSPC || error == EDQUOT ? "; free space there, nothing was half written" : "";
  fail(code, "{}: cannot {}: {}{}", path.string(), what, std::strerror(error), advice);
}

bool is_there(const fs::path& path) {
  std::error_code error;
  const bool there = fs::exists(path, error);
  if (error) fail_io("examine", path, error.value());
  return there;
}

// A descriptor that closes itself; close() reports what the kernel held back until then.
class Descriptor {
 public:
  Descriptor(const fs::path& path, int flags) : path_(path), value_(::open(path.c_str(), flags | O_CLOEXEC, 0644)) {
    if (value_ < 0) fail_io((flags & O_ACCMODE) == O_RDONLY ? "open" : "create", path_, errno);
  }
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }
  void sync() const {
    if (::fsync(value_) != 0) fail_io("flush to disk", path_, errno);
  }

 private:
  const fs::path& path_;
  int value_;
};

void sync_path(const fs::path& path, int flags) { Descriptor(path, flags).sync(); }

void sync_parent(const fs::path& path) {
  const auto parent = path.parent_path();
  sync_path(parent.empty() ? fs::path(".") : parent, O_RDONLY | O_DIRECTORY);
}

fs::path temporary_name(const fs::path& target) {
  const auto clean = target.filename().empty() ? target.parent_path() : target;  // "out/" is "out"
  const auto name = fmt::format("{}{}-{}", kPartialPrefix, clean.filename().string(), ::getpid());
  return clean.parent_path() / name;
}

void write_all(int descriptor, const fs::path& path, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      fail_io("write", path, errno);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

// The new folder takes the place of a full one in one step where the file system can exchange two names.
void put_in_place(const fs::path& temporary, const fs::path& target) {
  std::error_code ignored;  // of the old folder's removal: a partial name is never read
  if (::rename(temporary.c_str(), target.c_str()) == 0) return;
  if (errno != ENOTEMPTY && errno != EEXIST) fail_io("put in place", target, errno);
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(temporary, ignored);
    return;
  }
  if (errno != EINVAL && errno != ENOSYS) fail_io("put in place", target, errno);
  const auto old = fs::path(temporary).concat("-old");
  if (::rename(target.c_str(), old.c_str()) != 0) fail_io("move away", target, errno);
  if (::rename(temporary.c_str(), target.c_str()) != 0) fail_io("put in place", target, errno);
  fs::remove_all(old, ignored);
}

}  // namespace

std::string read_file(const fs::path& path, std::uint64_t max_bytes) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  if (bytes.size() > max_bytes) {
    fail_data("{}: {} bytes, more than the {} that a file of this kind may have", path.string(), bytes.size(),
              max_bytes);
  }
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void write_file(const fs::path& path, std::string_view contents) {
  AtomicFile file(path);
  file.write(contents);
  file.commit();
}

std::string checksum(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

MappedFile::MappedFile(const fs::path& path, Access access) : path_(path), access_(access) {
  const Descriptor descriptor(path_, O_RDONLY);
  struct stat status {};
  if (::fstat(descriptor.get(), &status) != 0) fail_io("examine", path_, errno);
  if (!S_ISREG(status.st_mode)) fail_data("{}: not a regular file", path_.string());
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;
  // No reserve: a model larger than the memory can be mapped; only the pages that are written take memory.
  const int protection = access_ == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* address = ::mmap(nullptr, size_, protection, MAP_PRIVATE | MAP_NORESERVE, descriptor.get(), 0);
  if (address == MAP_FAILED) fail_io("map", path_, errno);
  data_ = static_cast<std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

std::span<std::byte> MappedFile::writable_bytes() const {
  assert(access_ == Access::kCopyOnWrite);
  return {data_, size_};
}

AtomicFile::AtomicFile(fs::path target) : target_(std::move(target)), temporary_(temporary_name(target_)) {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail_io("create", temporary_, errno);
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) { write_all(descriptor_, target_, bytes); }

void AtomicFile::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

void AtomicFile::commit() {
  if (::fsync(descriptor_) != 0) fail_io("flush to disk", target_, errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_io("put in place", target_, errno);
  ::close(descriptor_);
  descriptor_ = -1;
  sync_parent(target_);
}

void check_new_file(const fs::path& target) {
  if (is_there(target)) fail_usage("{}: exists; name another file or remove it first", target.string());
}

void check_new_folder(const fs::path& target) {
  if (!is_there(target)) return;
  std::error_code error;
  if (!fs::is_directory(target, error)) {
    fail_usage("{}: exists and is no folder; name another or remove it first", target.string());
  }
  const bool empty = fs::is_empty(target, error);
  if (error) fail_io("read", target, error.value());
  if (!empty) {
    fail_usage("{}: exists and is not empty; name another folder or remove it first", target.string());
  }
}

AtomicFolder::AtomicFolder(fs::path target, Existing existing)
    : target_(std::move(target)), temporary_(temporary_name(target_)) {
  if (existing == Existing::kRefuse) check_new_folder(target_);
  std::error_code error;
  fs::remove_all(temporary_, error);  // from an earlier process of the same number
  if (fs::create_directories(temporary_, error); error) fail_io("create", temporary_, error.value());
}

AtomicFolder::~AtomicFolder() {
  if (temporary_.empty()) return;
  std::error_code ignored;  // a destructor has nobody to tell; the partial name is never read
  fs::remove_all(temporary_, ignored);
}

void AtomicFolder::commit() {
  for (const auto& entry : fs::recursive_directory_iterator(temporary_)) {
    sync_path(entry.path(), entry.is_directory() ? O_RDONLY | O_DIRECTORY : O_RDONLY);
  }
  sync_path(temporary_, O_RDONLY | O_DIRECTORY);
  put_in_place(temporary_, target_);
  temporary_.clear();
  sync_parent(target_);
}

}  // namespace sluice
