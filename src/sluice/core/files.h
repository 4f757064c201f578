// SPDX-License-Identifier: Apache-2.0
// Files that are either whole or not there. Everything written for keeps goes to a temporary name beside its target, is
// flushed to the disk, and is renamed; a crash or a full disk leaves the old state. Errors name the file and the cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

// The whole of a text file. Data error if it cannot be read or holds more than `max_bytes`.
std::string read_file(const std::filesystem::path& path, std::uint64_t max_bytes = std::uint64_t{1} << 30);

// Writes `contents` to `path` by temporary name, fsync and rename.
void write_file(const std::filesystem::path& path, std::string_view contents);

// XXH3-64 of the bytes, as 16 hex digits: finds damage, not malice.
std::string checksum(std::span<const std::byte> bytes);

// A file mapped into memory. Empty files map to an empty span. The file must not be cut while it is mapped; one that is
// replaced by rename stays as it was.
class MappedFile {
 public:
  enum class Access {
    kRead,
    kCopyOnWrite,  // may be written; what is written stays in this process and takes memory page by page
  };
  explicit MappedFile(const std::filesystem::path& path, Access access = Access::kRead);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::span<std::byte> writable_bytes() const;  // kCopyOnWrite alone
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  Access access_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// One file written piece by piece and put in place by commit(); removed by the destructor otherwise.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();  // fsync, rename, fsync of the folder

 private:
  std::filesystem::path target_, temporary_;
  int descriptor_ = -1;
};

// Usage error unless nothing is at `target`: a command that makes a file replaces none.
void check_new_file(const std::filesystem::path& target);

// Usage error unless nothing is at `target`, or an empty folder: a command that makes a folder replaces none.
void check_new_folder(const std::filesystem::path& target);

// A folder filled under a temporary name beside its target and put in place by commit(); removed by the destructor
// otherwise. The files in it are synced by commit().
class AtomicFolder {
 public:
  enum class Existing { kRefuse, kReplace };  // what happens to a target that exists and is not empty
  explicit AtomicFolder(std::filesystem::path target, Existing existing = Existing::kRefuse);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;
  const std::filesystem::path& path() const { return temporary_; }  // fill this
  void commit();

 private:
  std::filesystem::path target_, temporary_;
};

// Temporary names begin with this; one left behind by a killed process is never read and may be removed.
inline constexpr std::string_view kPartialPrefix = ".partial-";

}  // namespace sluice
