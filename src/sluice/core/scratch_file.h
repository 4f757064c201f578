// SPDX-License-Identifier: Apache-2.0
// Memory that lies in a file, for what a machine's memory does not hold. The file has no name: it is gone when the
// process ends, however it ends.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace sluice {

class ScratchFile {
 public:
  // In `folder`, which must exist; all zeros. Runtime error unless the disk has room for all of it: later writes find
  // their place.
  ScratchFile(const std::filesystem::path& folder, std::size_t bytes);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  std::span<std::byte> bytes() const { return {data_, size_}; }

  // Of a part of bytes(): it is read from the disk while the caller does something else; its pages leave this process,
  // and stay in the system's cache for as long as there is room.
  static void expect(std::span<const std::byte> part);
  static void release(std::span<const std::byte> part);

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

}  // namespace sluice
